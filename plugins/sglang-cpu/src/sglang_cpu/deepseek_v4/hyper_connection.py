# SPDX-License-Identifier: MIT
"""Hyper-connections: a block reads a mix of the residual streams and writes back to all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_cpu.deepseek_v4.numerics import rms_norm


@dataclass(frozen=True, slots=True)
class Mix:
    """How one token's streams enter a block (`pre`), take its output (`post`) and blend (`blend`).

    Shapes: `[tokens, streams]`, `[tokens, streams]` and `[tokens, streams, streams]`, all float64.
    """

    pre: torch.Tensor
    post: torch.Tensor
    blend: torch.Tensor


def mix(
    streams: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Mix:
    """Compute a block's mixing weights from its streams `[tokens, streams, hidden]`."""
    count = streams.shape[1]
    raw = rms_norm(streams.flatten(1), None, norm_eps) @ weight.double().T
    pre, post, blend = raw.split([count, count, count * count], dim=-1)
    pre_base, post_base, blend_base = base.double().split([count, count, count * count])
    pre_scale, post_scale, blend_scale = scale.double()
    return Mix(
        pre=torch.sigmoid(pre * pre_scale + pre_base) + eps,
        post=2 * torch.sigmoid(post * post_scale + post_base),
        blend=_sinkhorn((blend * blend_scale + blend_base).unflatten(-1, (count, count)), eps, iterations),
    )


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Return a block's input `[tokens, hidden]`: the streams weighted by `pre`."""
    return (pre.unsqueeze(-1) * streams.double()).sum(1).to(streams.dtype)


def expand(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, blend: torch.Tensor
) -> torch.Tensor:
    """Return the streams after a block: `post[i] * output + sum_j blend[j, i] * streams[j]`."""
    written = post.double().unsqueeze(-1) * output.double().unsqueeze(1)
    kept = (blend.double().unsqueeze(-1) * streams.double().unsqueeze(2)).sum(1)
    return (written + kept).to(output.dtype)


def head(
    streams: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
) -> torch.Tensor:
    """Collapse the streams after the last block, for the final norm."""
    raw = rms_norm(streams.flatten(1), None, norm_eps) @ weight.double().T
    return collapse(streams, torch.sigmoid(raw * scale.double() + base.double()) + eps)


def _sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """Make matrices nearly doubly stochastic; the column step comes last."""
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix
