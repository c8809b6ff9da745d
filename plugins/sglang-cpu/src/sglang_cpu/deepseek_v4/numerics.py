# SPDX-License-Identifier: MIT
"""Double-precision building blocks. Their results are rounded by the caller, once."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension to unit mean square, in double precision."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.double()


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate consecutive pairs of the last dimension, in double precision.

    Args:
        x: `[rows, ..., rope_dim]`.
        freqs_cis: `[rows, rope_dim / 2]` complex, one row per row of `x`.
        inverse: Rotate back.
    """
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turn = freqs_cis.to(torch.complex128)
    turn = turn.conj() if inverse else turn
    turn = turn.view(turn.shape[0], *[1] * (pairs.ndim - 2), turn.shape[1])
    return torch.view_as_real(pairs * turn).flatten(-2)


def rotate_tail(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate the last `2 * freqs_cis.shape[1]` channels of `x` and keep the others, in double precision."""
    rope_dim = 2 * freqs_cis.shape[-1]
    return torch.cat([x[..., :-rope_dim].double(), rotate(x[..., -rope_dim:], freqs_cis)], dim=-1)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Apply the orthonormal Walsh-Hadamard transform to the last dimension, a power of two."""
    size = x.shape[-1]
    x = x.double()
    half = 1
    while half < size:
        pairs = x.unflatten(-1, (-1, 2, half))
        x = torch.stack(
            [pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], dim=-2
        ).flatten(-3)
        half *= 2
    return x * size**-0.5
