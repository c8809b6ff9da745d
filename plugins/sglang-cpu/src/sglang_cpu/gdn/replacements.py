# SPDX-License-Identifier: MIT
"""Which SGLang functions the gated delta network kernels stand in for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_cpu import hooks, older_releases
from sglang_cpu.gdn import causal_conv, delta_rule, elementwise

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OPS = "sglang.kernels.ops"
_RECURRENT = "attention.fla.fused_recurrent"
_PROJECTION = "attention.triton_gdn_fused_proj"


def install() -> None:
    """Register the family's replacements."""
    functions: dict[str, Callable[..., Any]] = {
        "attention.fla.chunk.chunk_gated_delta_rule": delta_rule.chunk_gated_delta_rule,
        f"{_RECURRENT}.fused_recurrent_gated_delta_rule_packed_decode": delta_rule.packed_decode,
        "attention.fla.layernorm_gated.layernorm_fn": elementwise.gated_norm,
        "attention.linear.fused_gdn_gating.fused_gdn_gating": delta_rule.gates,
        f"{_PROJECTION}.fused_qkvzba_split_reshape_cat_contiguous": elementwise.split_projections,
        "elementwise.elementwise.fused_sigmoid_mul": elementwise.sigmoid_mul,
        "mamba.causal_conv1d_triton.causal_conv1d_fn": causal_conv.causal_conv1d_fn,
        "mamba.causal_conv1d_triton.causal_conv1d_update": causal_conv.causal_conv1d_update,
        "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers": elementwise.track_states,
    }
    for target, replacement in functions.items():
        hooks.replace(older_releases.place(f"{_OPS}.{target}"), replacement)
