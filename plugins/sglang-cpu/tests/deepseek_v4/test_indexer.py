# SPDX-License-Identifier: MIT
from __future__ import annotations

import torch
from sglang_cpu.deepseek_v4 import indexer
from sglang_cpu.deepseek_v4.codecs import quantize_index
from sglang_cpu.deepseek_v4.numerics import hadamard
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

HEADS, DIM = 4, 128


def test_the_best_entries_are_those_of_transformers_scorer() -> None:
    torch.manual_seed(0)
    query, keys, hidden = torch.randn(6, HEADS, DIM), torch.randn(40, DIM), torch.randn(6, 32)
    scorer = DeepseekV4IndexerScorer(
        DeepseekV4Config(hidden_size=32, index_n_heads=HEADS, index_head_dim=DIM)
    )
    with torch.no_grad():
        expected = scorer(query[None], keys[None], hidden[None])[0].topk(8, dim=1).indices
        weights = scorer.weights_proj(hidden)
    still = torch.ones(6, 32, dtype=torch.complex64)
    quantised, scaled = indexer.quantize_query(query, weights, DIM**-0.5 * HEADS**-0.5, still)
    values, scales = quantize_index(hadamard(keys))
    chosen = indexer.select(
        quantised, scaled, values.double(), scales.squeeze(1).double(), torch.full((6,), 40), 8
    )
    overlap = chosen.gather(1, expected).sum().item() / expected.numel()
    assert overlap >= 0.9, "only the quantisation may move an entry across the border"


def test_equal_scores_go_to_the_older_entries_however_many_newer_ones_exist() -> None:
    query, weights = torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, 1)
    for entries in (5, 9, 64):
        keys = torch.ones(entries, DIM, dtype=torch.float64)
        chosen = indexer.select(
            query, weights, keys, torch.ones(entries).double(), torch.tensor([entries]), 3
        )
        assert chosen[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_entries_that_are_not_complete_yet_are_never_chosen() -> None:
    query, weights = torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, 1)
    keys = torch.arange(10.0).double().unsqueeze(1).expand(10, DIM)
    chosen = indexer.select(query, weights, keys, torch.ones(10).double(), torch.tensor([2, 7]), 4)
    assert [row.nonzero().flatten().tolist() for row in chosen] == [[0, 1], [3, 4, 5, 6]]
