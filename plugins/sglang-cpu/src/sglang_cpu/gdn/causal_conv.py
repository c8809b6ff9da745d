# SPDX-License-Identifier: MIT
"""The short causal convolution in front of the delta rule, and its state: the last `width - 1` inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_PADDING_SLOT = -1


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = _PADDING_SLOT,
    **_launch: object,
) -> torch.Tensor:
    """Convolve a packed batch of sequences and leave each one's last inputs in its slot.

    Args:
        x: `[channels, tokens]`.
        weight: `[channels, width]`.
        bias: `[channels]` or None.
        conv_states: The pool, `[slots, channels, width - 1]`.
        query_start_loc: Where sequences start, and the end of the last one.
        seq_lens_cpu: Not used: `query_start_loc` says the same.
        cache_indices: One slot per sequence; `pad_slot_id` marks padding, which is left out.
        has_initial_state: Per sequence whether its slot holds earlier inputs; zeros are assumed otherwise.
        activation: `silu`, `swish`, True for the same, or None.
        pad_slot_id: See `cache_indices`.

    Returns:
        A tensor like `x`; undefined where the batch is padding.
    """
    del seq_lens_cpu
    bounds = query_start_loc.tolist()
    slots = range(len(bounds) - 1) if cache_indices is None else cache_indices.tolist()
    output = torch.empty_like(x)
    for row, slot in enumerate(slots):
        if slot == pad_slot_id:
            continue
        span = slice(bounds[row], bounds[row + 1])
        known = has_initial_state is not None and bool(has_initial_state[row])
        earlier = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        output[:, span], conv_states[slot] = _convolve(x[:, span], earlier, weight, bias, activation)
    return output


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = _PADDING_SLOT,
    intermediate_conv_window: torch.Tensor | None = None,
    **_launch: object,
) -> torch.Tensor:
    """Convolve one new input per sequence, `[batch, channels]`, and shift it into the sequence's slot.

    Raises:
        NotImplementedError: Circular states or the verification of draft tokens are asked for.
    """
    if cache_seqlens is not None or intermediate_conv_window is not None or x.dim() != 2:
        raise NotImplementedError("the CPU reference decodes one token per sequence, without speculation")
    slots = range(len(x)) if conv_state_indices is None else conv_state_indices.tolist()
    output = torch.empty_like(x)
    for row, slot in enumerate(slots):
        if slot == pad_slot_id:
            continue
        column, conv_state[slot] = _convolve(x[row][:, None], conv_state[slot], weight, bias, activation)
        output[row] = column[:, 0]
    return output


def _convolve(
    x: torch.Tensor,
    earlier: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of one sequence and its new state; in fp64, so that cutting leaves no trace."""
    inputs = torch.cat([earlier.to(x.dtype), x], dim=-1)
    tokens, width = x.shape[-1], weight.shape[-1]
    total = (
        torch.zeros(x.shape, dtype=torch.float64) if bias is None else bias.double()[:, None].expand(x.shape)
    )
    for tap in range(width):
        total = total + inputs[:, tap : tap + tokens].double() * weight[:, tap, None].double()
    if activation:
        total = total * total.sigmoid()
    return total.to(x.dtype), inputs[:, inputs.shape[-1] - (width - 1) :]
