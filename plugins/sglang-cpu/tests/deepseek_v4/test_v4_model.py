# SPDX-License-Identifier: MIT
"""The whole model over SGLang's real runner, pools and allocators."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sglang_cpu.deepseek_v4 import codecs
from sglang_cpu.deepseek_v4.numerics import hadamard
from sglang_cpu.tiny_models import deepseek_v4
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as reference

if TYPE_CHECKING:
    from collections.abc import Collection

TOKENS = 300


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)  # noqa: S311 - a repeatable prompt, no secret.
    return [draw.randrange(2, deepseek_v4.VOCABULARY) for _ in range(tokens)]


FIRST, SECOND = prompt(1, TOKENS), prompt(2, TOKENS)
DECODES = ["decode"] * 9

# At a border of pages, as after a restore; long enough for the indexer to have a choice.
LONG, RESTORED = prompt(3, 640), 512
POOLS = [
    "swa",
    "deepseek_v4_c4",
    "deepseek_v4_c4_indexer",
    "deepseek_v4_c4_state",
    "deepseek_v4_c4_indexer_state",
    "deepseek_v4_c128",
]

JOBS: dict[str, tuple[list[list[int]], list[object]]] = {
    "whole": ([FIRST], [[TOKENS]]),
    "second alone": ([SECOND], [[TOKENS]]),
    "chunked": ([FIRST], [[1], [5], [130], [131], [257], [TOKENS]]),
    "decoded": ([FIRST], [[TOKENS - 9], *DECODES]),
    "together": ([SECOND, FIRST], [[129, 254], [TOKENS - 9] * 2, *DECODES]),
    "long": ([LONG], [[RESTORED], [len(LONG)]]),
    **{pool: ([LONG], [[RESTORED], pool, [len(LONG)]]) for pool in POOLS},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    deepseek_v4.write_small(directory, 0)
    return directory


def run(checkpoint: Path, names: Collection[str], dtype: str) -> dict[str, list[torch.Tensor]]:
    jobs, results = checkpoint / "jobs.pt", checkpoint / "results.pt"
    torch.save([JOBS[name] for name in names], jobs)
    program = Path(__file__).with_name("run_model.py")
    # More threads would make the tiny products slower, and much slower on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, checkpoint, jobs, results, dtype]
    subprocess.run(command, check=True, env=environment)
    return dict(zip(names, torch.load(results), strict=True))


@pytest.fixture(scope="module")
def states(checkpoint: Path) -> dict[str, list[torch.Tensor]]:
    return run(checkpoint, JOBS, "bfloat16")


def test_a_prompt_in_chunks_gives_the_same_bits(states: dict[str, list[torch.Tensor]]) -> None:
    assert torch.equal(states["chunked"][0], states["whole"][0])


def test_decoding_gives_the_same_bits_as_prefill(states: dict[str, list[torch.Tensor]]) -> None:
    assert torch.equal(states["decoded"][0], states["whole"][0])


def test_two_prompts_together_give_the_same_bits_as_alone(states: dict[str, list[torch.Tensor]]) -> None:
    assert torch.equal(states["together"][0], states["second alone"][0])
    assert torch.equal(states["together"][1], states["whole"][0])


@pytest.mark.parametrize("pool", POOLS)
def test_what_follows_a_restored_prefix_depends_on_every_pool(
    states: dict[str, list[torch.Tensor]], pool: str
) -> None:
    changed = (states[pool][0] - states["long"][0])[RESTORED:].abs()
    assert changed.max() > 0.5
    # An entry made of lost states is complete after three more tokens.
    assert changed[8:].amax(1).gt(0).all()


def test_the_model_is_that_of_transformers_with_a_quantised_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = run(checkpoint, ["whole"], "float32")["whole"][0]
    quantise_the_cache_of_transformers(monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model.model(torch.tensor([FIRST])).last_hidden_state[0]
    difference = (actual - expected).abs()
    assert difference[0].max() < 1e-5
    # Values on the border of two float8 numbers go either way, and that spreads from token to token.
    assert difference.median() < 0.012
    assert (actual - torch.roll(expected, 1, 0)).abs().median() > 0.5


def quantise_the_cache_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, score = reference.eager_attention_forward, reference.DeepseekV4IndexerScorer.forward

    def through_kv_pages(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, 512)
        pages = torch.zeros(-(-len(flat) // 256), 149760, dtype=torch.uint8)
        codecs.store_kv(pages, torch.arange(len(flat)), flat, 256)
        return codecs.load_kv(pages, torch.arange(len(flat)), 256).to(rows.dtype).view_as(rows)

    def through_float8(rows: torch.Tensor) -> torch.Tensor:
        values, scale = codecs.quantize_index(hadamard(rows))
        return values.float() * scale

    def attend_quantised(
        module: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: object,
        **kwargs: object,
    ) -> object:
        del value
        key = through_kv_pages(key)
        return attend(module, query, key, key, *rest, **kwargs)

    monkeypatch.setattr(reference, "eager_attention_forward", attend_quantised)
    monkeypatch.setattr(
        reference.DeepseekV4IndexerScorer,
        "forward",
        lambda scorer, query, keys, hidden: score(
            scorer, through_float8(query), through_float8(keys), hidden
        ),
    )
