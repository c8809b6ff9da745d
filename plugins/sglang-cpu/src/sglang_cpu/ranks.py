# SPDX-License-Identifier: MIT
"""Products whose sum is divided over tensor-parallel ranks: the same bits as on one rank.

SGLang lets each rank round its part of the sum and adds the parts, which moves log-probabilities by 0.05 and
more. Here every rank gathers the parts it lacks, inputs and weights, and computes the whole product. Servers
with any number of ranks answer alike, and what does differ is the cache's fault.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_whole_linears: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()
_whole_experts: WeakKeyDictionary[torch.nn.Module, SimpleNamespace] = WeakKeyDictionary()


def install() -> None:
    """Replace SGLang's row-parallel layers and experts in this process. Imports both."""
    from sglang.srt.layers.linear import RowParallelLinear
    from sglang.srt.layers.moe import fused_moe_native

    from sglang_cpu import hooks

    hooks.replace(
        "sglang.srt.layers.linear.RowParallelLinear.forward", _row_parallel(RowParallelLinear.forward)
    )
    hooks.replace(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        _experts(fused_moe_native.moe_forward_native),
    )


def _row_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,  # noqa: ANN401 - SGLang has no types.
        input_: torch.Tensor,
        skip_all_reduce: bool = False,
        **options: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ranks = 1 if self.tp_group is None else self.tp_group.world_size
        if ranks == 1 or not self.input_is_parallel:
            return original(self, input_, skip_all_reduce, **options)  # type: ignore[no-any-return]
        if self not in _whole_linears:
            _whole_linears[self] = self.tp_group.all_gather(self.weight.data, dim=1)
        bias = None if self.skip_bias_add else self.bias
        whole = torch.nn.functional.linear(
            self.tp_group.all_gather(input_.contiguous(), dim=-1), _whole_linears[self], bias
        )
        is_sum = self.reduce_results and not skip_all_reduce
        return whole if is_sum else _share(whole, ranks), self.bias if self.skip_bias_add else None

    return forward


def _experts(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def moe_forward_native(layer: torch.nn.Module, *arguments: object) -> torch.Tensor:
        from sglang.srt.runtime_context import get_parallel

        group = get_parallel().tp_group
        if group.world_size == 1:
            return original(layer, *arguments)
        if layer not in _whole_experts:
            # Each rank has a part of the gate's rows, then the same part of the up projection's.
            gate, up = (
                group.all_gather(x.contiguous(), dim=1) for x in layer.w13_weight.data.chunk(2, dim=1)
            )
            _whole_experts[layer] = SimpleNamespace(
                num_experts=layer.num_experts,
                w13_weight=torch.cat((gate, up), dim=1),
                w2_weight=group.all_gather(layer.w2_weight.data, dim=2),
            )
        return _share(original(_whole_experts[layer], *arguments), group.world_size)

    return moe_forward_native


def _share(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return this rank's part of a sum that the caller makes; exact for a power of two."""
    return whole / ranks
