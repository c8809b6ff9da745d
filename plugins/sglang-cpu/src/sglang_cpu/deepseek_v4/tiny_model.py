# SPDX-License-Identifier: MIT
"""Write small DeepSeek V4 checkpoints with random weights, in the published checkpoint's own tensor names.

The widths that decide the cache's formats (head, rotary and index dimensions, window, ratios) are the real ones.
The weights are scaled so that activations stay near one and attention is selective: damage anywhere in the cache
changes the log-probabilities.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Config = dict[str, Any]

# A norm weight above one sharpens attention: with one, some fifty keys would share the weight evenly.
_KEY_GAIN = 1.5


def small_config(*, draft_layers: int = 0) -> Config:
    """Return a model of five layers that has every kind of attention: window, window + 4:1, window + 128:1."""
    return _config([0, 4, 128, 4, 0], hash_layers=1, index_top_k=64, draft_layers=draft_layers)


def flash_config(*, draft_layers: int = 1) -> Config:
    """Return a narrow model with the 43 layers of DeepSeek V4 Flash: its cache has Flash's page sizes."""
    return _config([0, 0, *[4, 128] * 20, 4], hash_layers=3, index_top_k=512, draft_layers=draft_layers)


def write(directory: Path, config: Config, *, seed: int = 0) -> None:
    """Write a checkpoint into a directory, creating it if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_Weights(config, seed).tensors, directory / "model.safetensors")


def _config(ratios: Sequence[int], *, hash_layers: int, index_top_k: int, draft_layers: int) -> Config:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": index_top_k,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "num_hash_layers": hash_layers,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
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
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": draft_layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


class _Weights:
    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._random = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        hidden = config["hidden_size"]
        self._normal("embed.weight", config["vocab_size"], hidden, fan_in=1)
        self._normal("head.weight", config["vocab_size"], hidden)
        self._norm("norm", hidden)
        self._hyper_connection_head("")
        for number, ratio in enumerate(config["compress_ratios"]):
            self._layer(f"layers.{number}.", ratio, hashed=number < config["num_hash_layers"])
        for number in range(config["num_nextn_predict_layers"]):
            self._draft_layer(f"mtp.{number}.")

    def _layer(self, prefix: str, ratio: int, *, hashed: bool) -> None:
        hidden = self._config["hidden_size"]
        self._norm(f"{prefix}attn_norm", hidden)
        self._norm(f"{prefix}ffn_norm", hidden)
        self._hyper_connection(f"{prefix}hc_attn")
        self._hyper_connection(f"{prefix}hc_ffn")
        self._attention(f"{prefix}attn.")
        if ratio:
            self._compressor(f"{prefix}attn.compressor.", ratio, self._config["head_dim"])
        if ratio == 4:  # noqa: PLR2004 - the ratio whose entries are indexed.
            self._indexer(f"{prefix}attn.indexer.")
        self._experts(f"{prefix}ffn.", hashed=hashed)

    def _draft_layer(self, prefix: str) -> None:
        hidden = self._config["hidden_size"]
        self._layer(prefix, 0, hashed=False)
        for name in ("e_proj", "h_proj"):
            self._normal(f"{prefix}{name}.weight", hidden, hidden)
        for name in ("enorm", "hnorm", "norm"):
            self._norm(f"{prefix}{name}", hidden)
        self._hyper_connection_head(prefix)

    def _attention(self, prefix: str) -> None:
        config = self._config
        hidden, head_dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
        rank, groups, group_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
        self._normal(f"{prefix}wq_a.weight", rank, hidden)
        self._norm(f"{prefix}q_norm", rank)
        self._normal(f"{prefix}wq_b.weight", heads * head_dim, rank)
        self._normal(f"{prefix}wkv.weight", head_dim, hidden)
        self._norm(f"{prefix}kv_norm", head_dim, gain=_KEY_GAIN)
        self._normal(f"{prefix}wo_a.weight", groups * group_rank, heads * head_dim // groups)
        self._normal(f"{prefix}wo_b.weight", hidden, groups * group_rank, gain=2.0)
        self._normal(f"{prefix}attn_sink", heads, fan_in=1, dtype=torch.float32)

    def _compressor(self, prefix: str, ratio: int, head_dim: int) -> None:
        width = head_dim * (2 if ratio == 4 else 1)  # noqa: PLR2004 - the ratio whose windows overlap.
        self._normal(f"{prefix}ape", ratio, width, fan_in=1, dtype=torch.float32)
        for name in ("wkv", "wgate"):
            self._normal(f"{prefix}{name}.weight", width, self._config["hidden_size"])
        self._norm(f"{prefix}norm", head_dim, gain=_KEY_GAIN)

    def _indexer(self, prefix: str) -> None:
        config = self._config
        heads, head_dim = config["index_n_heads"], config["index_head_dim"]
        self._normal(f"{prefix}wq_b.weight", heads * head_dim, config["q_lora_rank"])
        self._normal(f"{prefix}weights_proj.weight", heads, config["hidden_size"])
        self._compressor(f"{prefix}compressor.", 4, head_dim)

    def _experts(self, prefix: str, *, hashed: bool) -> None:
        config = self._config
        count, hidden = config["n_routed_experts"], config["hidden_size"]
        self._normal(f"{prefix}gate.weight", count, hidden)
        if hashed:
            choices = [
                torch.randperm(count, generator=self._random)[: config["num_experts_per_tok"]]
                for _ in range(config["vocab_size"])
            ]
            self.tensors[f"{prefix}gate.tid2eid"] = torch.stack(choices)
        else:
            self._normal(f"{prefix}gate.bias", count, fan_in=100, dtype=torch.float32)
        for name in [*(f"experts.{number}" for number in range(count)), "shared_experts"]:
            self._normal(f"{prefix}{name}.w1.weight", config["moe_intermediate_size"], hidden)
            self._normal(f"{prefix}{name}.w3.weight", config["moe_intermediate_size"], hidden)
            self._normal(f"{prefix}{name}.w2.weight", hidden, config["moe_intermediate_size"])

    def _hyper_connection(self, prefix: str) -> None:
        count = self._config["hc_mult"]
        rows = count * (count + 2)
        self._normal(f"{prefix}_fn", rows, count * self._config["hidden_size"], dtype=torch.float32)
        self._normal(f"{prefix}_base", rows, fan_in=1, dtype=torch.float32)
        self._normal(f"{prefix}_scale", 3, fan_in=4, dtype=torch.float32)

    def _hyper_connection_head(self, prefix: str) -> None:
        count = self._config["hc_mult"]
        self._normal(f"{prefix}hc_head_fn", count, count * self._config["hidden_size"], dtype=torch.float32)
        self._normal(f"{prefix}hc_head_base", count, fan_in=1, dtype=torch.float32)
        self._normal(f"{prefix}hc_head_scale", 1, fan_in=4, dtype=torch.float32)

    def _norm(self, name: str, size: int, *, gain: float = 1.0) -> None:
        spread = torch.randn(size, generator=self._random)
        self.tensors[f"{name}.weight"] = (gain * (1 + 0.1 * spread)).to(torch.bfloat16)

    def _normal(
        self,
        name: str,
        *shape: int,
        fan_in: int | None = None,
        gain: float = 1.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        scale = gain * (fan_in or shape[-1]) ** -0.5
        self.tensors[name] = (scale * torch.randn(shape, generator=self._random)).to(dtype)
