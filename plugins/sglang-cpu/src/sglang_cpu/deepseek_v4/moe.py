# SPDX-License-Identifier: MIT
"""Routed experts: every token through the experts its router chose."""

from __future__ import annotations

import torch

from sglang_cpu.deepseek_v4.numerics import linear


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs, `[tokens, hidden]` in the type of `x`.

    Args:
        x: `[tokens, hidden]`.
        gate_up: `[experts, 2 * intermediate, hidden]`, the gate's rows first.
        down: `[experts, hidden, intermediate]`.
        expert_ids: `[tokens, choices]`; negative ids are padding.
        expert_weights: `[tokens, choices]`.
        limit: Bound of the gate's (upper) and the up projection's (both sides) activations.
    """
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in expert_ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = torch.where(expert_ids == expert)
        gate, up = linear(x[token], gate_up[expert], dtype=torch.float64).chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        output = linear(torch.nn.functional.silu(gate) * up, down[expert])
        total.index_add_(0, token, output * expert_weights[token, choice].double().unsqueeze(-1))
    return total.to(x.dtype)
