# SPDX-License-Identifier: MIT
"""SGLang 0.5.9: what its patches add, observed in processes that run copies of the released wheel.

`hiradix_process.py` drives SGLang's real radix tree, controller, threads and pools, with our backend.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.testing.release_copy import WITHOUT_PATCH, apply_patches, environment, python
from ucm.testing.sglang_release import unpack_release

if TYPE_CHECKING:
    from ucm.patching.installation import Installation

VERSION = "0.5.9"
REPOSITORY = Path(__file__).resolve().parents[2]
PROCESS = Path(__file__).with_name("hiradix_process.py")
STORE = "ucm.integration.sglang.unifiedcache_store.UnifiedCacheStore"
HOOKS = "store-sidecar-pools-with-their-kv-pages.patch"
TIMEOUT_S = 300

WHOLE = {"pages": 4, "on the device": 4, "differing": [], "host pages": 4, "intact": True}
"""The restart of a server that restores all four pages of a prompt, and leaks or overruns no memory."""

THREADS = {
    "batch_exists": "prefetch_thread",
    "batch_get_v1": "prefetch_io_aux_thread",
    "batch_set_v1": "backup_thread",
}
"""The thread of SGLang from which it calls each method of a backend."""


def copy_of_the_release(directory: Path) -> Installation:
    return unpack_release(VERSION, directory / "site-packages")


def start(sglang: Installation, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 # The command is the tests' own.
        python(str(PROCESS), *arguments),
        env=environment(sglang),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def seen_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err[-4000:]
    seen: dict[str, Any] = json.loads(out.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A patched copy; `scripts/check_patches.py --needed` has it left without one of the patches."""
    copy = copy_of_the_release(tmp_path_factory.mktemp("patched"))
    apply_patches(copy, os.environ.get(WITHOUT_PATCH, ""))
    return copy


@pytest.fixture(scope="module")
def seen(patched: Installation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a patched SGLang does."""
    return seen_by(
        start(
            patched,
            str(tmp_path_factory.mktemp("storage")),
            *("accepted", "attached", "bad_index_pages", "failing_calls", "layouts", "long_prompt"),
            *("nsa", "nsa_files", "refusals", "restores", "through_copies", "v2_calls"),
        )
    )


@pytest.fixture(scope="module")
def seen_unpatched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang does as it was released."""
    directory = tmp_path_factory.mktemp("unpatched")
    names = ("failing_calls", "index_of_file", "plain_models_dynamic", "refusals")
    return seen_by(start(copy_of_the_release(directory), str(directory), *names))


@pytest.fixture(scope="module")
def seen_without_hooks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a patched SGLang does whose controller does not move the index."""
    directory = tmp_path_factory.mktemp("unhooked")
    copy = copy_of_the_release(directory)
    apply_patches(copy, without=HOOKS)
    return seen_by(start(copy, str(directory), "nsa"))


@pytest.fixture(scope="module")
def seen_by_ranks(patched: Installation, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two tensor parallel ranks of a patched SGLang see."""
    directory = str(tmp_path_factory.mktemp("ranks"))
    ranks = [start(patched, directory, "two-ranks", str(rank)) for rank in (0, 1)]
    try:
        return [seen_by(rank) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_the_command_line_accepts_unifiedcache(seen: dict[str, Any]) -> None:
    assert seen["accepted"] == {
        "unifiedcache": "unifiedcache",
        "file": "file",
        "no-such-backend": "SystemExit: 2",
    }


def test_the_factory_builds_our_store(seen: dict[str, Any]) -> None:
    assert seen["attached"]["class"] == STORE


def test_pages_are_read_and_written_in_place(seen: dict[str, Any]) -> None:
    assert seen["attached"]["get"] == "_page_get_zero_copy"
    assert seen["attached"]["set"] == "_page_set_zero_copy"


def test_layer_first_becomes_a_page_first_layout(seen: dict[str, Any]) -> None:
    assert seen["layouts"] == {"kernel": "page_first", "direct": "page_first_direct", "file": "layer_first"}


def test_the_hooks_restore_the_index_with_the_kv(
    seen: dict[str, Any], seen_without_hooks: dict[str, Any]
) -> None:
    assert seen_without_hooks["nsa"] == {**WHOLE, "differing": ["indexer"]}
    assert seen["nsa"] == WHOLE


def test_sglang_s_own_backend_loses_the_index_as_released(seen_unpatched: dict[str, Any]) -> None:
    """The fault that the hooks are for."""
    assert seen_unpatched["index_of_file"] == {**WHOLE, "differing": ["indexer"]}


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("model", ["mha", "mla", "nsa"])
def test_every_model_is_restored_in_both_layouts(seen: dict[str, Any], model: str, layout: str) -> None:
    assert seen["restores"][f"{model} {layout}"] == WHOLE


@pytest.mark.parametrize("model", ["mha", "mla", "nsa"])
def test_every_model_is_restored_through_copies_of_its_pages(seen: dict[str, Any], model: str) -> None:
    assert seen["through_copies"][model] == WHOLE


def test_a_prompt_longer_than_one_batch_of_the_controller_is_restored_whole(seen: dict[str, Any]) -> None:
    assert seen["long_prompt"] == {"pages": 298, "on the device": 300, "differing": []}


def test_the_index_has_the_namespace_of_later_releases(seen: dict[str, Any]) -> None:
    assert seen["nsa_files"] == {".": 4, "sglang_v2/indexer_16896x1": 4}


@pytest.mark.parametrize("page", [0, 2, 3])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_nothing_is_restored_from_a_bad_page_of_the_index_on(
    seen: dict[str, Any], damage: str, page: int
) -> None:
    restored = {"pages": page, "on the device": page, "differing": []}
    assert seen["bad_index_pages"][f"{damage} {page}"] == restored


def test_models_without_an_index_make_no_v2_calls(seen: dict[str, Any]) -> None:
    assert seen["v2_calls"] == {
        "mha": [],
        "mla": [],
        "nsa": [
            *("register_mem_host_pool_v2", "batch_set_v2"),
            *("register_mem_host_pool_v2", "batch_exists_v2", "batch_get_v2"),
        ],
    }


def test_the_index_is_written_by_rank_0_and_found_by_rank_1(seen_by_ranks: list[dict[str, Any]]) -> None:
    assert [rank["calls"] for rank in seen_by_ranks] == [
        ["register_mem_host_pool_v2", "batch_set_v2"],
        ["register_mem_host_pool_v2"],
    ]
    for rank in seen_by_ranks:
        assert rank["restored"] == {"pages": 4, "on the device": 4, "differing": []}


def test_an_index_page_that_one_rank_lost_is_lost_to_both(seen_by_ranks: list[dict[str, Any]]) -> None:
    for rank in seen_by_ranks:
        assert rank["after a loss on rank 1"] == {"pages": 3, "on the device": 3, "differing": []}


@pytest.mark.parametrize("method", list(THREADS))
def test_the_storage_threads_outlive_a_backend_that_raises(
    seen: dict[str, Any], seen_unpatched: dict[str, Any], method: str
) -> None:
    assert seen_unpatched["failing_calls"][method]["dead"] == [THREADS[method]]
    assert seen["failing_calls"][method] == {
        "lost": 4 if method == "batch_set_v1" else 0,
        "dead": [],
        # What a failed call had taken of the host is given back.
        "afterwards": {**WHOLE, "host pages": 8 if method == "batch_set_v1" else 4},
    }


def test_a_backend_that_cannot_store_the_index_is_refused(seen: dict[str, Any]) -> None:
    assert "HiCacheFile cannot store indexer" in seen["refusals"]["nsa file"]
    assert seen["refusals"]["mla file"] == "attached"


def test_a_directory_is_for_one_layout_of_the_kv_beside_an_index(seen: dict[str, Any]) -> None:
    assert "stored with layout = 'page_first'" in seen["refusals"]["nsa other layout"]


def test_an_unpatched_release_serves_models_without_an_index(seen_unpatched: dict[str, Any]) -> None:
    assert seen_unpatched["plain_models_dynamic"] == {"mha": WHOLE, "mla": WHOLE}


def test_an_unpatched_release_is_refused_for_a_model_with_an_index(seen_unpatched: dict[str, Any]) -> None:
    assert "run `ucm-sglang patch apply`" in seen_unpatched["refusals"]["nsa"]
