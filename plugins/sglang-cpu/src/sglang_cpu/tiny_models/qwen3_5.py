# SPDX-License-Identifier: MIT
"""A tiny Qwen3.5 text model: three gated delta network layers and one of full attention, 1.6 MB."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_cpu.tiny_models import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = 128
FEED_FORWARD = 256
LAYERS = 4
FULL_ATTENTION_EVERY = 4
VOCABULARY = 512
ATTENTION_HEADS, ATTENTION_KV_HEADS, ATTENTION_DIM = 4, 2, 32
KEY_HEADS, VALUE_HEADS, LINEAR_DIM = 2, 4, 32
CONV_WIDTH = 4

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": LAYERS,
    "full_attention_interval": FULL_ATTENTION_EVERY,
    "num_attention_heads": ATTENTION_HEADS,
    "num_key_value_heads": ATTENTION_KV_HEADS,
    "head_dim": ATTENTION_DIM,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": LINEAR_DIM,
    "linear_value_head_dim": LINEAR_DIM,
    "linear_conv_kernel_dim": CONV_WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(directory: Path, seed: int) -> None:
    """Write the model into an existing directory."""
    checkpoint.save(directory, CONFIG, _weights(checkpoint.RandomWeights(seed)))


def _weights(draw: checkpoint.RandomWeights) -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": draw.normal(VOCABULARY, HIDDEN),
        "model.norm.weight": _norm_offset(draw, HIDDEN),
        # Logits with a standard deviation of 3: neither flat nor decided by one token.
        "lm_head.weight": draw.linear(VOCABULARY, HIDDEN, gain=3.0),
    }
    for layer in range(LAYERS):
        full_attention = (layer + 1) % FULL_ATTENTION_EVERY == 0
        mixer = _full_attention(draw) if full_attention else _delta_network(draw)
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in (mixer | _rest(draw)).items()}
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _rest(draw: checkpoint.RandomWeights) -> dict[str, torch.Tensor]:
    return {
        "input_layernorm.weight": _norm_offset(draw, HIDDEN),
        "post_attention_layernorm.weight": _norm_offset(draw, HIDDEN),
        "mlp.gate_proj.weight": draw.linear(FEED_FORWARD, HIDDEN),
        "mlp.up_proj.weight": draw.linear(FEED_FORWARD, HIDDEN),
        "mlp.down_proj.weight": draw.linear(HIDDEN, FEED_FORWARD),
    }


def _full_attention(draw: checkpoint.RandomWeights) -> dict[str, torch.Tensor]:
    query_dim, kv_dim = ATTENTION_HEADS * ATTENTION_DIM, ATTENTION_KV_HEADS * ATTENTION_DIM
    return {
        # Queries and the output gate share a projection.
        "self_attn.q_proj.weight": draw.linear(2 * query_dim, HIDDEN),
        "self_attn.k_proj.weight": draw.linear(kv_dim, HIDDEN),
        "self_attn.v_proj.weight": draw.linear(kv_dim, HIDDEN),
        "self_attn.o_proj.weight": draw.linear(HIDDEN, query_dim, gain=2.0),
        "self_attn.q_norm.weight": _norm_offset(draw, ATTENTION_DIM),
        "self_attn.k_norm.weight": _norm_offset(draw, ATTENTION_DIM),
    }


def _delta_network(draw: checkpoint.RandomWeights) -> dict[str, torch.Tensor]:
    key_dim, value_dim = KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM
    channels = 2 * key_dim + value_dim
    return {
        "linear_attn.in_proj_qkv.weight": draw.linear(channels, HIDDEN),
        "linear_attn.in_proj_z.weight": draw.linear(value_dim, HIDDEN),
        "linear_attn.in_proj_b.weight": draw.linear(VALUE_HEADS, HIDDEN),
        "linear_attn.in_proj_a.weight": draw.linear(VALUE_HEADS, HIDDEN),
        "linear_attn.conv1d.weight": draw.normal(channels, 1, CONV_WIDTH, std=1 / math.sqrt(CONV_WIDTH)),
        "linear_attn.dt_bias": draw.normal(VALUE_HEADS, std=0.1),
        # Decay rates of 0.002 to 0.05 a token: the state remembers a prompt of some hundred tokens.
        "linear_attn.A_log": draw.uniform(VALUE_HEADS, low=math.log(0.002), high=math.log(0.05)),
        "linear_attn.norm.weight": draw.normal(LINEAR_DIM, mean=1.0, std=0.1),
        "linear_attn.out_proj.weight": draw.linear(HIDDEN, value_dim, gain=2.0),
    }


def _norm_offset(draw: checkpoint.RandomWeights, size: int) -> torch.Tensor:
    """These norms multiply by 1 + weight."""
    return draw.normal(size, std=0.1)
