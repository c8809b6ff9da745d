# SPDX-License-Identifier: MIT
"""The lightning indexer: which compressed entries a query attends to."""

from __future__ import annotations

import torch

from sglang_cpu.deepseek_v4.codecs import quantize_index
from sglang_cpu.deepseek_v4.numerics import hadamard, rotate_tail


def quantize_query(
    query: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    freqs_cis: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate, transform and quantise index queries.

    Args:
        query: `[tokens, heads, 128]`.
        weights: `[tokens, heads]`, how much a head counts.
        weight_scale: Constant factor of the weights.
        freqs_cis: `[tokens, rope_dim / 2]` complex.

    Returns:
        The queries as float8 and the weights `[tokens, heads, 1]`, which take over the queries' scales.
    """
    values, scale = quantize_index(hadamard(rotate_tail(query, freqs_cis)))
    return values, weights.unsqueeze(-1).float() * weight_scale * scale


def select(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    entries: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Choose the `top_k` best of the first `entries[t]` keys for every token `t`.

    Equal scores go to the older entry, so that the choice does not depend on how many newer ones exist.

    Returns:
        `[tokens, keys]` bool.
    """
    reachable = torch.arange(keys.shape[0]) < entries.unsqueeze(1)
    if keys.shape[0] <= top_k:
        return reachable
    per_head = torch.relu(query.double() @ keys.T)
    scores = (per_head * weights.double()).sum(1) * key_scales
    ranked = scores.masked_fill(~reachable, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros_like(reachable).scatter_(1, ranked[:, :top_k], True)
    return chosen & reachable
