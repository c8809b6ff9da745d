# SPDX-License-Identifier: MIT
"""Products and attention must give a token the same bits whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_cpu import invariant
from torch.nn import functional


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    rows, matrix = random(37, 1000, dtype=dtype), random(1000, 64, dtype=dtype)

    together = invariant.mm(rows, matrix)

    for count in (1, 2, 5, 16):
        assert torch.equal(invariant.mm(rows[:count], matrix), together[:count])


def test_products_are_rounded_once() -> None:
    a, b, bias = random(5, 300), random(300, 7), random(7)
    exact = a.double() @ b.double()

    assert torch.equal(invariant.mm(a, b), exact.bfloat16())
    assert torch.equal(invariant.addmm(bias, a, b), (bias.double() + exact).bfloat16())
    assert torch.equal(invariant.bmm(a[None], b[None])[0], exact.bfloat16())


def test_an_addition_is_scaled_as_torch_does() -> None:
    bias, a, b = (random(*shape, dtype=torch.float64) for shape in ((3, 4), (3, 5), (5, 4)))

    ours = invariant.addmm(bias, a, b, beta=0.5, alpha=2)

    torch.testing.assert_close(ours, torch.addmm(bias, a, b, beta=0.5, alpha=2))


def test_products_of_integers_stay_integers() -> None:
    a = torch.arange(6).reshape(2, 3)

    assert torch.equal(invariant.mm(a, a.T), torch.tensor([[5, 14], [14, 50]]))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.rand(300, 300) > 0.3}],
    ids=["full", "causal", "scaled", "masked"],
)
def test_attention_is_that_of_torch(arguments: dict[str, Any]) -> None:
    query, key, value = (random(1, heads, 300, 16, dtype=torch.float64) for heads in (4, 2, 2))

    ours = invariant.attention(query, key, value, enable_gqa=True, **arguments)

    expected = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **arguments)
    torch.testing.assert_close(ours, expected)


def test_a_token_decoded_alone_attends_as_in_a_prefill() -> None:
    query, key, value = (random(1, heads, 300, 16) for heads in (4, 2, 2))

    prefilled = invariant.attention(query, key, value, is_causal=True, enable_gqa=True)

    for length in (1, 64, 257, 300):
        decoded = invariant.attention(
            query[..., length - 1 : length, :], key[..., :length, :], value[..., :length, :], enable_gqa=True
        )
        assert torch.equal(decoded[..., 0, :], prefilled[..., length - 1, :])
