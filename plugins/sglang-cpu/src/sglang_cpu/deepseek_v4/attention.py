# SPDX-License-Identifier: MIT
"""Attention of one request over its sliding window and its compressed past, with a sink per head."""

from __future__ import annotations

import torch

WINDOW_TOKENS = 128
_QUERIES_PER_BLOCK = 128


def attend(
    query: torch.Tensor,
    window: torch.Tensor,
    compressed: torch.Tensor,
    visible: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return `[queries, heads, dim]` in the type of `query`. Keys are values.

    Args:
        query: `[queries, heads, dim]` at consecutive positions.
        window: `[context + queries, dim]`, the rows at and before the queries' own positions; `context` is
            `WINDOW_TOKENS - 1` or all there is.
        compressed: `[entries, dim]`, possibly empty.
        visible: `[queries, entries]` bool, which entries a query sees.
        sink: `[heads]`, a logit that takes weight and gives nothing.
        scale: Factor of the logits.
    """
    blocks = [
        _attend_block(query, window, compressed, visible, sink, scale, first)
        for first in range(0, query.shape[0], _QUERIES_PER_BLOCK)
    ]
    return torch.cat(blocks).to(query.dtype)


def _attend_block(
    query: torch.Tensor,
    window: torch.Tensor,
    compressed: torch.Tensor,
    visible: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    first: int,
) -> torch.Tensor:
    last = min(first + _QUERIES_PER_BLOCK, query.shape[0])
    context = window.shape[0] - query.shape[0]
    own = torch.arange(first, last) + context
    low = max(0, first + context - WINDOW_TOKENS + 1)
    key = torch.arange(low, last + context)
    in_window = (key <= own[:, None]) & (key > own[:, None] - WINDOW_TOKENS)
    allowed = torch.cat([in_window, visible[first:last]], dim=1)
    rows = torch.cat([window[low : last + context], compressed])
    logits = (query[first:last].double() @ rows.T) * scale
    logits = logits.masked_fill(~allowed.unsqueeze(1), float("-inf"))
    sinks = sink.double().view(1, -1, 1).expand(logits.shape[0], -1, 1)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    return weights @ rows
