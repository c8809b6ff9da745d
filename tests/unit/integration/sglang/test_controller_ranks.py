# SPDX-License-Identifier: MIT
"""Two ranks in two processes: TP, CP and PP ranks agree over gloo as SGLang's do, DP ranks do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER = Path(__file__).with_name("rank_process.py")
SHARED_KEY_ROUNDS = 300
MODELS = [
    "indexer-beside-mla",
    "mamba-beside-mla",
    "mamba-beside-mha",
    "deepseek-v4",
    "mha-draft-beside-mla",
    "dsa-draft-beside-dsa",
    # sglang #15175, #37149, #26670
    "indexer-beside-mla, pp",
    "mamba-beside-mla, pp",
    "indexer-beside-mla, cp",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run both ranks through all models once; return where they stored blocks and what they saw."""
    directory = tmp_path_factory.mktemp("ranks")
    commands = [[sys.executable, str(WORKER), str(rank), str(directory)] for rank in (0, 1)]
    environment = {**os.environ, "SGLANG_PLUGINS": "ucm"}
    ranks = [subprocess.Popen(command, env=environment) for command in commands]  # noqa: S603 - our own file.
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return directory


def seen(directory: Path, model: str) -> list[Mapping[str, Any]]:
    return [json.loads((directory / f"{rank}.json").read_text())[model] for rank in (0, 1)]


@pytest.mark.parametrize("model", MODELS)
def test_both_ranks_restore_the_whole_prompt_and_their_own_bytes(directory: Path, model: str) -> None:
    assert [(rank["pages"], rank["differing"]) for rank in seen(directory, model)] == [(4, [])] * 2


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        ("indexer-beside-mla", {".": 4, "sglang_v2/indexer_25344x1": 4}),
        ("mamba-beside-mla", {".": 4, "sglang_v2/mamba_476x1": 2}),
        ("mamba-beside-mha", {".": 8, "sglang_v2/mamba_476x1": 2}),
        ("mha-draft-beside-mla", {".": 4, "sglang_v2/draft_2048x2": 8}),
        (
            "dsa-draft-beside-dsa",
            {
                ".": 4,
                "sglang_v2/indexer_25344x1": 4,
                "sglang_v2/draft_3072x1": 4,
                "sglang_v2/draft_indexer_8448x1": 4,
            },
        ),
        ("indexer-beside-mla, pp", {".": 8, "sglang_v2/indexer_25344x1": 8}),
        ("mamba-beside-mla, pp", {".": 8, "sglang_v2/mamba_476x1": 2}),
        ("indexer-beside-mla, cp", {".": 8, "sglang_v2/indexer_25344x1": 8}),
    ],
)
def test_ranks_store_what_they_share_once_and_what_they_split_each(
    directory: Path, model: str, counts: dict[str, int]
) -> None:
    assert seen(directory, model)[0]["blocks"] == counts


@pytest.mark.parametrize(
    ("model", "pages"),
    [
        ("indexer-beside-mla", 3),
        ("mamba-beside-mla", 0),
        ("mamba-beside-mha", 0),
        ("deepseek-v4", 3),
        ("mha-draft-beside-mla", 3),
        ("dsa-draft-beside-dsa", 3),
        ("indexer-beside-mla, pp", 3),
        ("mamba-beside-mla, pp", 0),
        ("indexer-beside-mla, cp", 3),
    ],
)
def test_a_page_that_one_rank_lost_is_lost_to_both(directory: Path, model: str, pages: int) -> None:
    assert [rank["pages_after_loss"] for rank in seen(directory, model)] == [pages] * 2


# sglang #31926
def test_ranks_that_write_the_same_keys_at_once_end_in_one_good_block_each(directory: Path) -> None:
    everything = {"stored": SHARED_KEY_ROUNDS, "whole": SHARED_KEY_ROUNDS}

    assert seen(directory, "shared keys") == [everything] * 2
