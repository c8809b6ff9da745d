# SPDX-License-Identifier: MIT
"""What surrounds the delta rule in a layer: splitting the projections, gating, the norm of the output."""

from __future__ import annotations

import torch


def split_projections(
    mixed_qkvz: torch.Tensor,
    mixed_gates: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split `[q | k | v | z]` and `[b | a]`.

    Returns:
        `[tokens, q | k | v]`, z `[tokens, value heads, V]`, b and a `[tokens, value heads]`; all contiguous.
    """
    qkv_width = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    qkv, z = mixed_qkvz.split([qkv_width, num_heads_v * head_v], dim=-1)
    b, a = mixed_gates.split([num_heads_v, num_heads_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """Multiply by the sigmoid of a gate of as many elements."""
    if quant:
        raise NotImplementedError("the CPU reference does not quantise activations")
    gated = attn_output.double() * gate.reshape(attn_output.shape).double().sigmoid()
    return attn_output.copy_(gated) if inplace else gated.to(attn_output.dtype)


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Normalise the last axis in groups of `group_size`; multiply by the activated gate z before or after."""
    values = x.double()
    gate = None if z is None else _activate(z.reshape(x.shape).double(), activation)
    if gate is not None and not norm_before_gate:
        values = values * gate
    groups = values.unflatten(-1, (-1, group_size or x.shape[-1]))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    values = groups.flatten(-2) * weight.double()
    if bias is not None:
        values = values + bias.double()
    if gate is not None and norm_before_gate:
        values = values * gate
    return values.to(x.dtype)


def _activate(z: torch.Tensor, activation: str) -> torch.Tensor:
    return z.sigmoid() if activation == "sigmoid" else z * z.sigmoid()


def track_states(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of marked sequences to their checkpoint slots, in the pools of all layers.

    Args:
        conv_states_pool: `[layers, slots, ...]`.
        ssm_states_pool: `[layers, slots, ...]`.
        cache_indices: Slot of each sequence.
        mamba_track_mask: Which sequences are to be copied.
        mamba_track_indices: Where to.
        batch_size: Sequences in the batch; the arguments above may be longer.
        check_freed_slots: Leave out sequences with a negative slot on either side.
    """
    marked = mamba_track_mask[:batch_size].bool()
    sources = cache_indices[:batch_size][marked].long()
    targets = mamba_track_indices[:batch_size][marked].long()
    if check_freed_slots:
        valid = (sources >= 0) & (targets >= 0)
        sources, targets = sources[valid], targets[valid]
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, targets] = pool[:, sources]
