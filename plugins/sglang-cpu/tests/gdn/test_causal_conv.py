# SPDX-License-Identifier: MIT
"""The convolution against torch's own, and its state."""

from __future__ import annotations

import pytest
import torch
from sglang_cpu.gdn.causal_conv import causal_conv1d_fn, causal_conv1d_update
from torch.nn import functional

CHANNELS, WIDTH = 10, 4
SLOTS = 4


def parameters(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, bias and a pool full of earlier inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(CHANNELS, WIDTH, generator=generator)
    bias = torch.randn(CHANNELS, generator=generator)
    pool = torch.randn(SLOTS, CHANNELS, WIDTH - 1, generator=generator)
    return weight, bias, pool


def reference(
    x: torch.Tensor, earlier: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    inputs = torch.cat([earlier, x], dim=-1)[None]
    return functional.silu(functional.conv1d(inputs, weight[:, None], bias, groups=CHANNELS))[0]


def test_a_packed_batch_is_convolved_sequence_by_sequence() -> None:
    weight, bias, pool = parameters()
    x = torch.randn(CHANNELS, 12)

    output = causal_conv1d_fn(
        x,
        weight,
        bias,
        conv_states=pool.clone(),
        query_start_loc=torch.tensor([0, 7, 12]),
        seq_lens_cpu=[7, 5],
        cache_indices=torch.tensor([3, 1]),
        has_initial_state=torch.tensor([True, False]),
    )

    torch.testing.assert_close(output[:, :7], reference(x[:, :7], pool[3], weight, bias))
    torch.testing.assert_close(output[:, 7:], reference(x[:, 7:], torch.zeros_like(pool[1]), weight, bias))


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_state_is_the_last_inputs_also_of_short_sequences(tokens: int) -> None:
    weight, bias, pool = parameters()
    x = torch.randn(CHANNELS, tokens)
    expected = torch.cat([pool[2], x], dim=-1)[:, -(WIDTH - 1) :]

    causal_conv1d_fn(
        x,
        weight,
        bias,
        conv_states=pool,
        query_start_loc=torch.tensor([0, tokens]),
        seq_lens_cpu=[tokens],
        cache_indices=torch.tensor([2]),
        has_initial_state=torch.tensor([True]),
    )

    assert torch.equal(pool[2], expected)


def test_decoding_gives_the_same_bits_as_prefilling() -> None:
    weight, bias, pool = parameters()
    x = torch.randn(CHANNELS, 6).bfloat16()
    pool = pool.bfloat16()
    decode_pool = pool.clone()
    prefilled = causal_conv1d_fn(
        x,
        weight,
        bias,
        conv_states=pool,
        query_start_loc=torch.tensor([0, 6]),
        seq_lens_cpu=[6],
        cache_indices=torch.tensor([1]),
        has_initial_state=torch.tensor([True]),
    )

    for token in range(6):
        decoded = causal_conv1d_update(
            x[:, token][None], decode_pool, weight, bias, "silu", conv_state_indices=torch.tensor([1])
        )
        assert torch.equal(decoded[0], prefilled[:, token])
    assert torch.equal(decode_pool, pool)


def test_padding_touches_no_state() -> None:
    weight, bias, pool = parameters()
    before = pool.clone()

    causal_conv1d_update(
        torch.randn(1, CHANNELS), pool, weight, bias, "silu", conv_state_indices=torch.tensor([-1])
    )

    assert torch.equal(pool, before)
