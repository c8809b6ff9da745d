# SPDX-License-Identifier: MIT
"""Compression against transformers' modules, and the ring against what later windows need."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_cpu.deepseek_v4.compressor import Compression
from sglang_cpu.deepseek_v4.numerics import rms_norm, rotate_tail
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as reference

HEAD_DIM, HIDDEN = 512, 16
RING_ROWS = {4: 8, 128: 128}
RING_ROWS_WITH_DRAFTS = {4: 16, 128: 256}
PAGE = 256


def compressor_of_transformers(ratio: int) -> torch.nn.Module:
    torch.manual_seed(ratio)
    config = DeepseekV4Config(hidden_size=HIDDEN, num_hidden_layers=1, head_dim=HEAD_DIM, q_lora_rank=8)
    module = {4: reference.DeepseekV4CSACompressor, 128: reference.DeepseekV4HCACompressor}[ratio](
        config
    ).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def entries_of_transformers(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    tokens = x.shape[0]
    with torch.no_grad():
        entries, _ = module(x[None], torch.zeros(1, tokens, 8).double(), torch.arange(tokens)[None], None, 0)
    return entries[0, 0]


def position_bias(module: torch.nn.Module, ratio: int) -> torch.Tensor:
    bias = module.position_bias.detach()
    return torch.cat(bias.chunk(2, dim=1)) if ratio == 4 else bias


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_equal_those_of_transformers(ratio: int) -> None:
    module, shape = compressor_of_transformers(ratio), Compression(ratio, HEAD_DIM)
    x = torch.randn(2 * 128 + 7, HIDDEN).double()
    with torch.no_grad():
        rows = torch.cat([module.kv_proj(x), module.gate_proj(x)], dim=1)
        closing = shape.closing_positions(0, len(x))
        entries = rms_norm(
            shape.pool(rows, 0, position_bias(module, ratio), closing), module.kv_norm.weight, 1e-6
        )
        cos, sin = module.rotary_emb(x, (closing + 1 - ratio)[None], layer_type="compress")
    entries = rotate_tail(entries, torch.complex(cos[0], sin[0]))
    torch.testing.assert_close(entries, entries_of_transformers(module, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [4, 128])
@settings(deadline=None, max_examples=50)
@given(cuts=st.sets(st.integers(1, 699), max_size=6))
def test_however_a_prompt_is_cut_the_entries_are_the_same(ratio: int, cuts: set[int]) -> None:
    shape = Compression(ratio, 8)
    torch.manual_seed(0)
    rows = torch.randn(700, 2 * 8 * (2 if ratio == 4 else 1)).double()
    bias = torch.randn(shape.window_tokens, 8)
    whole = shape.pool(rows, 0, bias, shape.closing_positions(0, 700))
    ring = Ring(ratio)
    parts = []
    borders = [0, *sorted(cuts), 700]
    for start, end in itertools.pairwise(borders):
        first = start - shape.carried_tokens(start)
        known = torch.cat([ring.read(first, start, rows.shape[1]), rows[start:end]])
        parts.append(shape.pool(known, first, bias, shape.closing_positions(start, end)))
        ring.write(shape, rows, start, end)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("ratio", [4, 128])
@settings(deadline=None, max_examples=50)
@given(accepted=st.lists(st.integers(1, 4), min_size=40, max_size=80))
def test_rejected_draft_tokens_leave_no_trace(ratio: int, accepted: list[int]) -> None:
    shape, ring, drafted = Compression(ratio, 8), Ring(ratio, drafts=True), 4
    torch.manual_seed(0)
    rows = torch.randn(120 + 4 * 80 + drafted, 2 * 8 * (2 if ratio == 4 else 1)).double()
    bias = torch.randn(shape.window_tokens, 8)
    ring.write(shape, rows, 0, 120)
    start = 120
    for count in accepted:
        end = start + drafted
        own = rows[start:end].clone()
        own[count:] = torch.nan
        first = start - shape.carried_tokens(start)
        known = torch.cat([ring.read(first, start, rows.shape[1]), own])
        closing = shape.closing_positions(start, start + count)
        if len(closing):
            expected = shape.pool(rows, 0, bias, closing)
            assert torch.equal(shape.pool(known, first, bias, closing), expected)
        ring.write(shape, torch.cat([rows[:start], own]), start, end)
        start += count


@given(pages=st.integers(1, 3))
def test_a_prompt_that_shares_pages_finds_what_it_needs_at_their_end(pages: int) -> None:
    shape, ring = Compression(4, 8), Ring(4)
    rows = torch.randn(1000, 32).double()
    ring.write(shape, rows, 0, 1000)
    start = pages * PAGE
    first = start - shape.carried_tokens(start)
    assert torch.equal(ring.read(first, start, 32), rows[first:start])


class Ring:
    """Rows as the device pool addresses them: a ring per page at 4:1, else per request."""

    def __init__(self, ratio: int, *, drafts: bool = False) -> None:
        self._ratio, self._length = ratio, (RING_ROWS_WITH_DRAFTS if drafts else RING_ROWS)[ratio]
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def _address(self, position: int) -> tuple[int, int]:
        return position // PAGE if self._ratio == 4 else 0, position % self._length

    def write(self, shape: Compression, rows: torch.Tensor, start: int, end: int) -> None:
        kept = shape.written_to_ring(start, end, self._length, PAGE)
        for position in (torch.arange(start, end)[kept]).tolist():
            self._rows[self._address(position)] = rows[position]

    def read(self, start: int, end: int, width: int) -> torch.Tensor:
        found = [self._rows[self._address(position)] for position in range(start, end)]
        return torch.stack(found) if found else torch.empty(0, width).double()
