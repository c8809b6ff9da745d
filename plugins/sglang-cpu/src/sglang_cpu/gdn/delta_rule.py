# SPDX-License-Identifier: MIT
"""The gated delta rule, one token after the other.

For each value head, with its key head's q and k scaled to unit length, state S `[V, K]` and output o are

    S <- exp(g) * S;   S <- S + beta * (v - S k) k^T;   o = S q / sqrt(K)

The state is kept in the precision of the pool that stores it, after every token and not only when stored.
So it makes no difference where a prefill is cut, whether a token was prefilled or decoded, and which other
sequences were in the batch: the same tokens give the same bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK_TOKENS = 64
"""Distance of the states that a prefill hands out for checkpoints; `CHUNK_SIZE` of SGLang's kernels."""


def gates(
    A_log: torch.Tensor,  # noqa: N803 - SGLang passes it by this name.
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute decay and step size per token and value head.

    Returns:
        `g` (log of the decay) and `beta`, both fp32 `[1, tokens, heads]`; beta is rounded to the type of `b`.
    """
    decay_rate = A_log.double().exp()
    g = -decay_rate * functional.softplus(a.double() + dt_bias.double(), beta, threshold)
    return g.float()[None], b.double().sigmoid().to(b.dtype).float()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Run a packed batch of sequences through the recurrence.

    Args:
        q: `[1, tokens, key heads, K]`.
        k: Like `q`.
        v: `[1, tokens, value heads, V]`.
        g: Log of the decay, `[1, tokens, value heads]`.
        beta: Step size, like `g`.
        scale: Of the output; 1 / sqrt(K) if None.
        initial_state: The pool, `[slots, value heads, V, K]`.
        initial_state_indices: One slot per sequence.
        cu_seqlens: Where sequences start, and the end of the last one.
        head_first: Must be False.
        use_qk_l2norm_in_kernel: Scale q and k to unit length.
        inplace_update: Leave each sequence's last state in its slot.

    Returns:
        The output like `v`, None, and for each sequence its states before tokens 0, 64, 128, ...:
        `[1, states of all sequences, value heads, V, K]`, in the precision of the pool.
    """
    if head_first or initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise NotImplementedError("the CPU reference runs packed batches with a state pool only")
    output = torch.empty_like(v)
    checkpoints = []
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), bounds, bounds[1:], strict=False):
        span = slice(start, end)
        queries, keys = q[0, span], k[0, span]
        if use_qk_l2norm_in_kernel:
            queries, keys = unit_length(queries), unit_length(keys)
        output[0, span], states, last = _run(
            queries * (scale or k.shape[-1] ** -0.5),
            keys,
            v[0, span],
            g[0, span],
            beta[0, span],
            initial_state[slot],
        )
        checkpoints += states
        if inplace_update:
            initial_state[slot] = last
    return output, None, torch.stack(checkpoints)[None]


def packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 - SGLang passes it by this name.
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance each sequence of a batch by one token.

    Args:
        mixed_qkv: `[batch, q | k | v]`.
        a: `[batch, value heads]`, input of the decay.
        b: `[batch, value heads]`, input of the step size.
        A_log: Log of the decay rate per value head.
        dt_bias: Added to `a`.
        scale: Of the output.
        initial_state: The pool, `[slots, value heads, V, K]`; updated in place.
        out: `[batch, 1, value heads, V]`; written.
        ssm_state_indices: One slot per sequence; a negative one marks padding and gives zeros.
        use_qk_l2norm_in_kernel: Scale q and k to unit length.

    Returns:
        `out` and `initial_state`.
    """
    value_heads, value_dim, key_dim = initial_state.shape[-3:]
    key_width = (mixed_qkv.shape[-1] - value_heads * value_dim) // 2
    q, k, v = mixed_qkv.split([key_width, key_width, value_heads * value_dim], dim=-1)
    g, beta = gates(A_log, a, b, dt_bias)
    for row, slot in enumerate(ssm_state_indices.tolist()):
        if slot < 0:
            out[row] = 0
            continue
        query, key = q[row].view(1, -1, key_dim), k[row].view(1, -1, key_dim)
        if use_qk_l2norm_in_kernel:
            query, key = unit_length(query), unit_length(key)
        value = v[row].view(1, value_heads, value_dim)
        out[row], _, initial_state[slot] = _run(
            query * scale, key, value, g[0, row : row + 1], beta[0, row : row + 1], initial_state[slot]
        )
    return out, initial_state


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Scale the last axis to length 1; fp32 whatever the input."""
    x = x.double()
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).float()


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Run one sequence, without a batch axis; return outputs, states at chunk starts, and the last state."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(group, dim=1).unsqueeze(-2) for x in (q, k))
    v, beta = v.float(), beta[..., None]
    decay = g.double().exp().float()[..., None, None]
    stored, outputs, checkpoints = state.dtype, torch.empty_like(v), []
    state = state.float()
    for t in range(len(v)):
        if t % CHUNK_TOKENS == 0:
            checkpoints.append(state.to(stored, copy=True))
        state = state * decay[t]
        correction = (v[t] - (state * k[t]).sum(-1)) * beta[t]
        state = (state + correction[..., None] * k[t]).to(stored).float()
        outputs[t] = (state * q[t]).sum(-1)
    return outputs, checkpoints, state.to(stored)
