# SPDX-License-Identifier: MIT
"""One of two ranks that compute products divided over ranks; the first also computes them whole.

    python row_parallel_process.py RANK DIRECTORY

The layers and the group are stand-ins: SGLang's own need a server's whole parallel state.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from sglang_cpu import invariant, ranks

RANKS = 2


class Group:
    """What the layers call of SGLang's `GroupCoordinator`."""

    world_size = RANKS

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(RANKS)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)


class Layer(torch.nn.Module):
    """A row-parallel layer on one rank."""

    def __init__(self, weight: torch.Tensor, *, reduce_results: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None
        self.tp_group = Group()
        self.reduce_results = reduce_results
        self.input_is_parallel, self.skip_bias_add = True, False


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def main(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=RANKS)
    x, weight = random(5, 64), random(7, 64)
    forward = ranks._row_parallel(mock.Mock(side_effect=AssertionError("the original was called")))
    whole = invariant.mm(x, weight.T)
    for reduce_results in (True, False):
        layer = Layer(weight.chunk(RANKS, 1)[rank].contiguous(), reduce_results=reduce_results)
        output, _ = forward(layer, x.chunk(RANKS, 1)[rank])
        if not reduce_results:
            dist.all_reduce(output)
        assert torch.equal(output, whole)

    w13, w2 = random(3, 2 * 16, 64), random(3, 64, 16)
    gate, up = (half.chunk(RANKS, 1)[rank] for half in w13.chunk(2, 1))
    part = Layer(weight, reduce_results=False)
    part.num_experts, part.w13_weight = 3, torch.cat((gate, up), 1)
    part.w2_weight = w2.chunk(RANKS, 2)[rank]
    seen = []

    def native(layer: SimpleNamespace, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(layer)
        return tokens

    with mock.patch(
        "sglang.srt.runtime_context.get_parallel", return_value=SimpleNamespace(tp_group=Group())
    ):
        output = ranks._experts(native)(part, x)
    dist.all_reduce(output)
    assert torch.equal(output, x)
    assert torch.equal(seen[0].w13_weight, w13)
    assert torch.equal(seen[0].w2_weight, w2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    # Without the interpreter's end, which aborts if one of gloo's threads still has to let go of a tensor.
    os._exit(0)
