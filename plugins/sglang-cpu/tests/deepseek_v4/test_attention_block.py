# SPDX-License-Identifier: MIT
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_cpu.deepseek_v4.attention import WINDOW_TOKENS, attend
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

HEADS, DIM = 2, 512


def expected_output(
    query: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    module = SimpleNamespace(num_key_value_groups=HEADS, sinks=sink, training=False)
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    keys = rows[None, None]
    return eager_attention_forward(module, query.transpose(0, 1)[None], keys, keys, mask[None, None], scale)[
        0
    ][0]


@pytest.mark.parametrize("start", [0, 3, 127, 128, 500])
@pytest.mark.parametrize("queries", [1, 130])
def test_window_sink_and_compressed_entries_are_attended_as_in_transformers(start: int, queries: int) -> None:
    torch.manual_seed(start)
    query = torch.randn(queries, HEADS, DIM, dtype=torch.float64)
    tokens = torch.randn(start + queries, DIM, dtype=torch.float64)
    compressed = torch.randn(6, DIM, dtype=torch.float64)
    visible, sink = torch.rand(queries, 6) < 0.5, torch.randn(HEADS, dtype=torch.float64)
    own, key = torch.arange(start, start + queries)[:, None], torch.arange(start + queries)
    in_window = (key <= own) & (key > own - WINDOW_TOKENS)
    expected = expected_output(
        query, torch.cat([tokens, compressed]), torch.cat([in_window, visible], 1), sink, DIM**-0.5
    )
    window = tokens[max(0, start - WINDOW_TOKENS + 1) :]
    torch.testing.assert_close(attend(query, window, compressed, visible, sink, DIM**-0.5), expected)


def test_a_query_gets_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    query = torch.randn(300, HEADS, DIM).to(torch.bfloat16)
    tokens, compressed = torch.randn(300, DIM).double(), torch.randn(75, DIM).double()
    visible, sink = torch.arange(75) < torch.arange(1, 301)[:, None] // 4, torch.randn(HEADS)
    batch = attend(query, tokens, compressed, visible, sink, DIM**-0.5)
    for row in (0, 127, 128, 255, 299):
        window = tokens[max(0, row - WINDOW_TOKENS + 1) : row + 1]
        entries = (row + 1) // 4
        alone = attend(
            query[row : row + 1],
            window,
            compressed[:entries],
            visible[row : row + 1, :entries],
            sink,
            DIM**-0.5,
        )
        assert torch.equal(alone[0], batch[row])
