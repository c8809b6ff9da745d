# SPDX-License-Identifier: MIT
"""The delta rule against transformers' torch versions of it, and its independence of chunks and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from sglang_cpu.gdn import delta_rule
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 8
SLOTS = 6


@dataclass(frozen=True, slots=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def span(self, start: int, end: int) -> Inputs:
        return Inputs(*(x[:, start:end] for x in (self.q, self.k, self.v, self.g, self.beta)))


def random_inputs(tokens: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    return Inputs(
        q=normal(KEY_HEADS, KEY_DIM).bfloat16(),
        k=normal(KEY_HEADS, KEY_DIM).bfloat16(),
        v=normal(VALUE_HEADS, VALUE_DIM).bfloat16(),
        g=-normal(VALUE_HEADS).abs() / 10,
        beta=normal(VALUE_HEADS).sigmoid(),
    )


def random_pool(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=generator).to(dtype)


def run(
    inputs: Inputs, pool: torch.Tensor, slots: list[int], bounds: list[int], *, inplace_update: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    output, _, checkpoints = delta_rule.chunk_gated_delta_rule(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        initial_state=pool,
        initial_state_indices=torch.tensor(slots),
        cu_seqlens=torch.tensor(bounds),
        use_qk_l2norm_in_kernel=True,
        inplace_update=inplace_update,
    )
    return output, checkpoints


@pytest.mark.parametrize("reference", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_outputs_and_last_state_are_those_of_transformers(
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    inputs, pool = random_inputs(150), random_pool()
    group = VALUE_HEADS // KEY_HEADS
    expected, expected_state = reference(
        inputs.q.float().repeat_interleave(group, dim=2),
        inputs.k.float().repeat_interleave(group, dim=2),
        inputs.v.float(),
        inputs.g,
        inputs.beta,
        initial_state=pool[3:4].transpose(-1, -2).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )

    output, _ = run(inputs, pool, [3], [0, 150])

    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(pool[3], expected_state[0].transpose(-1, -2), rtol=1e-4, atol=1e-4)


def test_checkpoints_are_the_states_at_chunk_starts_of_each_sequence() -> None:
    inputs, pool = random_inputs(150 + 64), random_pool()

    _, checkpoints = run(inputs, pool.clone(), [2, 0], [0, 150, 214])

    expected = [pool[2].clone()]
    for start in (0, 64):
        scratch = expected[-1][None].clone()
        run(inputs.span(start, start + 64), scratch, [0], [0, 64])
        expected.append(scratch[0])
    # The second sequence is exactly one chunk long: its state after that chunk is no checkpoint.
    expected.append(pool[0])
    torch.testing.assert_close(checkpoints[0], torch.stack(expected), rtol=0, atol=0)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 149])
def test_a_cut_prefill_gives_the_same_bits(cut: int, pool_dtype: torch.dtype) -> None:
    inputs = random_inputs(150)
    whole_pool, cut_pool = random_pool(dtype=pool_dtype), random_pool(dtype=pool_dtype)

    whole, _ = run(inputs, whole_pool, [1], [0, 150])
    first, _ = run(inputs.span(0, cut), cut_pool, [1], [0, cut])
    second, _ = run(inputs.span(cut, 150), cut_pool, [1], [0, 150 - cut])

    assert torch.equal(torch.cat([first, second], dim=1), whole)
    assert torch.equal(cut_pool, whole_pool)


def test_a_sequence_does_not_depend_on_the_others_in_its_batch() -> None:
    inputs = random_inputs(300)
    batch_pool, single_pool = random_pool(), random_pool()

    batch, _ = run(inputs, batch_pool, [4, 1, 5], [0, 100, 170, 300])
    single, _ = run(inputs.span(100, 170), single_pool, [1], [0, 70])

    assert torch.equal(batch[:, 100:170], single)
    assert torch.equal(batch_pool[1], single_pool[1])


def test_the_pool_is_left_alone_when_the_update_is_not_wanted() -> None:
    inputs, pool = random_inputs(70), random_pool()

    run(inputs, pool, [1], [0, 70], inplace_update=False)

    assert torch.equal(pool, random_pool())


def test_decoding_gives_the_same_bits_as_prefilling() -> None:
    tokens = 5
    inputs = random_inputs(tokens)
    a, b = torch.randn(tokens, VALUE_HEADS).bfloat16(), torch.randn(tokens, VALUE_HEADS).bfloat16()
    a_log, dt_bias = torch.rand(VALUE_HEADS) - 3, torch.randn(VALUE_HEADS)
    g, beta = delta_rule.gates(a_log, a, b, dt_bias)
    prefill_pool, decode_pool = random_pool(), random_pool()
    prefilled, _ = run(Inputs(inputs.q, inputs.k, inputs.v, g, beta), prefill_pool, [2], [0, tokens])

    packed = torch.cat([x[0].flatten(1) for x in (inputs.q, inputs.k, inputs.v)], dim=-1)
    for token in range(tokens):
        row = slice(token, token + 1)
        out = torch.empty(1, 1, VALUE_HEADS, VALUE_DIM, dtype=torch.bfloat16)
        delta_rule.packed_decode(
            packed[row],
            a[row],
            b[row],
            a_log,
            dt_bias,
            KEY_DIM**-0.5,
            decode_pool,
            out,
            torch.tensor([2]),
            use_qk_l2norm_in_kernel=True,
        )
        assert torch.equal(out[0], prefilled[:, token])
    assert torch.equal(decode_pool, prefill_pool)


def test_padding_in_a_decode_batch_gives_zeros_and_touches_no_state() -> None:
    pool = random_pool()
    width = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    out = torch.full((1, 1, VALUE_HEADS, VALUE_DIM), torch.nan)
    zeros = torch.zeros(1, VALUE_HEADS)

    delta_rule.packed_decode(
        torch.ones(1, width), zeros, zeros, zeros[0], zeros[0], 1.0, pool, out, torch.tensor([-1])
    )

    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(pool, random_pool())


def test_gates_follow_their_formula() -> None:
    a, b = torch.randn(7, VALUE_HEADS), torch.randn(7, VALUE_HEADS)
    a_log, dt_bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)

    g, beta = delta_rule.gates(a_log, a, b, dt_bias)

    torch.testing.assert_close(g[0], -a_log.exp() * torch.nn.functional.softplus(a + dt_bias))
    torch.testing.assert_close(beta[0], b.sigmoid())
