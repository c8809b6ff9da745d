# SPDX-License-Identifier: MIT
"""Tiny DeepSeek V4 models, in the published checkpoint's own tensor names.

The sizes that decide the cache's formats (heads, rotary and index dimensions, window, ratios) are the real
ones. There is no `swiglu_limit`, because SGLang's torch experts do not apply it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_cpu.tiny_models import checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HIDDEN = 128
VOCABULARY = 512
HEADS, HEAD_DIM = 4, 512
QUERY_RANK = 64
OUTPUT_GROUPS, OUTPUT_RANK = 2, 32
INDEX_HEADS, INDEX_DIM = 4, 128
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH = 8, 2, 64
STREAMS = 4

SMALL_RATIOS = (0, 4, 128, 4, 0)
"""Every kind of attention: sliding window alone, with 4:1 and with 128:1 compression."""

FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)
"""The 43 layers of DeepSeek V4 Flash. A model of them has a cache with Flash's page sizes."""

# Keys of unit size would share a random query's attention almost evenly, and damage to one would not show.
_KEY_GAIN = 1.5

# What the blocks of a model with a draft layer add, relative to the embedding: so little that the last token
# mostly decides the next one, and a draft layer that sees only that is right about half the time.
_DRAFTABLE = 0.25


def write_small(directory: Path, seed: int) -> None:
    """Write a model of five layers into an existing directory."""
    _write(directory, seed, SMALL_RATIOS, hash_layers=1, index_top_k=64, draft_layers=0)


def write_small_mtp(directory: Path, seed: int) -> None:
    """Write a model of five layers and one that predicts the next token."""
    _write(directory, seed, SMALL_RATIOS, hash_layers=1, index_top_k=64, draft_layers=1)


def write_flash43_mtp(directory: Path, seed: int) -> None:
    """Write a model of Flash's 43 layers and one that predicts the next token."""
    _write(directory, seed, FLASH_RATIOS, hash_layers=3, index_top_k=512, draft_layers=1)


def _write(
    directory: Path,
    seed: int,
    ratios: Sequence[int],
    *,
    hash_layers: int,
    index_top_k: int,
    draft_layers: int,
) -> None:
    config = _config(ratios, hash_layers, index_top_k, draft_layers)
    draw = checkpoint.RandomWeights(seed)
    block_gain = _DRAFTABLE / math.sqrt(2 * len(ratios)) if draft_layers else 1.0
    weights = {
        "embed.weight": draw.normal(VOCABULARY, HIDDEN),
        # Logits with a standard deviation of 3: neither flat nor decided by one token.
        "head.weight": draw.linear(VOCABULARY, HIDDEN, gain=3.0),
        "norm.weight": _norm(draw, HIDDEN),
        **_hyper_connection_head(draw),
    }
    for number, ratio in enumerate(ratios):
        layer = _layer(draw, ratio, block_gain, hashed=number < hash_layers)
        weights |= {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}
    for number in range(draft_layers):
        draft = _draft_layer(draw, block_gain, weights)
        weights |= {f"mtp.{number}.{name}": tensor for name, tensor in draft.items()}
    checkpoint.save(
        directory, config, {name: _in_checkpoint_type(name, tensor) for name, tensor in weights.items()}
    )


def _in_checkpoint_type(name: str, tensor: torch.Tensor) -> torch.Tensor:
    kept = (
        not tensor.is_floating_point()
        or ".hc_" in f".{name}"
        or name.endswith((".ape", ".attn_sink", ".bias"))
    )
    return tensor if kept else tensor.to(torch.bfloat16)


def _layer(
    draw: checkpoint.RandomWeights, ratio: int, gain: float, *, hashed: bool
) -> dict[str, torch.Tensor]:
    attention = _attention(draw, gain)
    if ratio:
        attention |= _prefixed("compressor", _compressor(draw, ratio, HEAD_DIM))
    if ratio == 4:
        attention |= _prefixed("indexer", _indexer(draw))
    return {
        "attn_norm.weight": _norm(draw, HIDDEN),
        "ffn_norm.weight": _norm(draw, HIDDEN),
        **_hyper_connection(draw, "hc_attn"),
        **_hyper_connection(draw, "hc_ffn"),
        **_prefixed("attn", attention),
        **_prefixed("ffn", _experts(draw, gain, hashed=hashed)),
    }


def _draft_layer(
    draw: checkpoint.RandomWeights, gain: float, target: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Predict from the last token alone, as the target nearly does, with the target's own output weights."""
    shared = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")
    return {
        **_layer(draw, 0, gain, hashed=False),
        "e_proj.weight": torch.eye(HIDDEN),
        "h_proj.weight": draw.linear(HIDDEN, HIDDEN, gain=0.05),
        "enorm.weight": _norm(draw, HIDDEN),
        "hnorm.weight": _norm(draw, HIDDEN),
        **{name: target[name].clone() for name in shared},
    }


def _attention(draw: checkpoint.RandomWeights, gain: float) -> dict[str, torch.Tensor]:
    return {
        "wq_a.weight": draw.linear(QUERY_RANK, HIDDEN),
        "q_norm.weight": _norm(draw, QUERY_RANK),
        "wq_b.weight": draw.linear(HEADS * HEAD_DIM, QUERY_RANK),
        "wkv.weight": draw.linear(HEAD_DIM, HIDDEN),
        "kv_norm.weight": _norm(draw, HEAD_DIM, mean=_KEY_GAIN),
        "wo_a.weight": draw.linear(OUTPUT_GROUPS * OUTPUT_RANK, HEADS * HEAD_DIM // OUTPUT_GROUPS),
        "wo_b.weight": draw.linear(HIDDEN, OUTPUT_GROUPS * OUTPUT_RANK, gain=2.0 * gain),
        "attn_sink": draw.normal(HEADS),
    }


def _compressor(draw: checkpoint.RandomWeights, ratio: int, head_dim: int) -> dict[str, torch.Tensor]:
    width = head_dim * (2 if ratio == 4 else 1)  # At 4:1, windows overlap.
    return {
        "ape": draw.normal(ratio, width),
        "wkv.weight": draw.linear(width, HIDDEN),
        "wgate.weight": draw.linear(width, HIDDEN),
        "norm.weight": _norm(draw, head_dim, mean=_KEY_GAIN),
    }


def _indexer(draw: checkpoint.RandomWeights) -> dict[str, torch.Tensor]:
    return {
        "wq_b.weight": draw.linear(INDEX_HEADS * INDEX_DIM, QUERY_RANK),
        "weights_proj.weight": draw.linear(INDEX_HEADS, HIDDEN),
        **_prefixed("compressor", _compressor(draw, 4, INDEX_DIM)),
    }


def _experts(draw: checkpoint.RandomWeights, gain: float, *, hashed: bool) -> dict[str, torch.Tensor]:
    weights = {"gate.weight": draw.linear(EXPERTS, HIDDEN)}
    if hashed:
        # A ranking of the experts per token id; the first ones serve it.
        ranking = draw.normal(VOCABULARY, EXPERTS).argsort(dim=1)
        weights["gate.tid2eid"] = ranking[:, :EXPERTS_PER_TOKEN]
    else:
        weights["gate.bias"] = draw.normal(EXPERTS, std=0.1)
    for name in [*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"]:
        weights[f"{name}.w1.weight"] = draw.linear(EXPERT_WIDTH, HIDDEN)
        weights[f"{name}.w3.weight"] = draw.linear(EXPERT_WIDTH, HIDDEN)
        weights[f"{name}.w2.weight"] = draw.linear(HIDDEN, EXPERT_WIDTH, gain=gain)
    return weights


def _hyper_connection(draw: checkpoint.RandomWeights, name: str) -> dict[str, torch.Tensor]:
    rows = STREAMS * (STREAMS + 2)
    return {
        f"{name}_fn": draw.linear(rows, STREAMS * HIDDEN),
        f"{name}_base": draw.normal(rows),
        f"{name}_scale": draw.normal(3, std=0.5),
    }


def _hyper_connection_head(draw: checkpoint.RandomWeights) -> dict[str, torch.Tensor]:
    return {
        "hc_head_fn": draw.linear(STREAMS, STREAMS * HIDDEN),
        "hc_head_base": draw.normal(STREAMS),
        "hc_head_scale": draw.normal(1, std=0.5),
    }


def _norm(draw: checkpoint.RandomWeights, size: int, mean: float = 1.0) -> torch.Tensor:
    return draw.normal(size, mean=mean, std=0.1 * mean)


def _prefixed(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in weights.items()}


def _config(
    ratios: Sequence[int], hash_layers: int, index_top_k: int, draft_layers: int
) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": len(ratios),
        "num_nextn_predict_layers": draft_layers,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": 8192,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        "kv_lora_rank": HEAD_DIM,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "q_lora_rank": QUERY_RANK,
        "o_groups": OUTPUT_GROUPS,
        "o_lora_rank": OUTPUT_RANK,
        "sliding_window": 128,
        "compress_ratios": list(ratios),
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": index_top_k,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "hidden_act": "silu",
        "intermediate_size": EXPERT_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 0,
        "num_hash_layers": hash_layers,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
    }
