# SPDX-License-Identifier: MIT
"""Releases whose patches bring the index to storage, observed in processes that run copies of their wheels.

`hiradix_process.py` drives SGLang's real radix tree, controller, threads and pools, with our backend.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.patching.patch_set import PatchSet, patch_sets_directory, supported_versions
from ucm.testing.hicache_stack import PATIENT, dynamic_storage, hicache_stack
from ucm.testing.host_pools import DsaModel
from ucm.testing.release_copy import WITHOUT_PATCH, environment, python
from ucm.testing.sglang_release import unpack_patched_release, unpack_release
from ucm.testing.sglang_runtime import HicacheSettings

if TYPE_CHECKING:
    from ucm.patching.installation import Installation

PROCESS = Path(__file__).with_name("hiradix_process.py")
HOOKS = "store-sidecar-pools-with-their-kv-pages.patch"
TIMEOUT_S = 300


def patch_names(version: str) -> list[str]:
    return [patch.name for patch in PatchSet.read(patch_sets_directory() / version).patches]


RELEASES = [
    version for version in supported_versions(patch_sets_directory()) if HOOKS in patch_names(version)
]

WHOLE = {"pages": 4, "on the device": 4, "differing": [], "host pages": 4, "intact": True}
"""The restart of a server that restores all four pages of a prompt, and leaks or overruns no memory."""

THREADS = {
    "batch_exists": "prefetch_thread",
    "batch_get_v1": "prefetch_io_aux_thread",
    "batch_set_v1": "backup_thread",
}
"""The thread of SGLang from which it calls each method of a backend."""


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


@pytest.fixture(scope="module", params=RELEASES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def patched(version: str, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A patched copy; `scripts/check_patches.py --needed` has it left without one of the patches."""
    without = os.environ.get(WITHOUT_PATCH, "")
    without = without if without in patch_names(version) else ""
    return unpack_patched_release(version, tmp_path_factory.mktemp("patched"), without=without)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, version: str) -> Path:
    """Where a patched SGLang stores; each observation has a directory below it."""
    return tmp_path_factory.mktemp(f"storage-{version}")


@pytest.fixture(scope="module")
def seen(patched: Installation, directory: Path) -> dict[str, Any]:
    """What a patched SGLang does."""
    return seen_by(
        start(
            patched,
            str(directory),
            *("bad_index_pages", "calls", "failing_calls", "layouts", "long_prompt", "nsa"),
            *("refusals", "restores", "stored", "through_copies"),
        )
    )


@pytest.fixture(scope="module")
def seen_unpatched(version: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang does as it was released."""
    directory = tmp_path_factory.mktemp("unpatched")
    names = ("failing_calls", "index_of_file", "plain_models_dynamic", "refusals")
    return seen_by(start(unpack_release(version, directory / "sglang"), str(directory), *names))


@pytest.fixture(scope="module")
def seen_without_hooks(version: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a patched SGLang does whose controller does not move the index."""
    directory = tmp_path_factory.mktemp("unhooked")
    copy = unpack_patched_release(version, directory / "sglang", without=HOOKS)
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
    assert seen["stored"]["blocks"] == {".": 4, "sglang_v2/indexer_25344x1": 4}


def test_the_newest_release_restores_what_an_old_one_stored(seen: dict[str, Any], directory: Path) -> None:
    settings = HicacheSettings(
        page_tokens=64, model_name="org/model", **dynamic_storage(directory / "stored", **PATIENT)
    )
    with hicache_stack(DsaModel(), settings, seed=2) as newest:
        restored = newest.restore(list(range(4 * 64)))

    assert restored.storage_tokens == 4 * 64
    assert {
        kind: [hashlib.sha256(page).hexdigest() for page in pages]
        for kind, pages in restored.contents.items()
    } == {kind: [page[kind] for page in seen["stored"]["digests"]] for kind in ("kv", "indexer")}


@pytest.mark.parametrize("page", [0, 2, 3])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_nothing_is_restored_from_a_bad_page_of_the_index_on(
    seen: dict[str, Any], damage: str, page: int
) -> None:
    restored = {"pages": page, "on the device": page, "differing": []}
    assert seen["bad_index_pages"][f"{damage} {page}"] == restored


def test_the_index_is_written_before_the_kv_and_read_after_it(seen: dict[str, Any]) -> None:
    registered = ["register_mem_pool_host", "register_mem_host_pool_v2"]
    assert seen["calls"]["nsa"] == [
        *(*registered, "batch_set_v2", "batch_set_v1"),
        *(*registered, "batch_exists_v2", "batch_get_v1", "batch_get_v2"),
    ]


@pytest.mark.parametrize("model", ["mha", "mla"])
def test_models_without_an_index_make_no_v2_calls(seen: dict[str, Any], model: str) -> None:
    assert seen["calls"][model] == [
        *("register_mem_pool_host", "batch_set_v1"),
        *("register_mem_pool_host", "batch_exists", "batch_get_v1"),
    ]


def test_the_index_is_written_by_rank_0_and_found_by_rank_1(seen_by_ranks: list[dict[str, Any]]) -> None:
    assert [rank["calls"] for rank in seen_by_ranks] == [
        ["register_mem_pool_host", "register_mem_host_pool_v2", "batch_set_v2", "batch_set_v1"],
        ["register_mem_pool_host", "register_mem_host_pool_v2"],
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


def test_a_backend_that_cannot_store_the_index_is_refused(seen: dict[str, Any], version: str) -> None:
    if version == "0.5.9":  # Later, `file` stores more pools than one.
        assert "HiCacheFile cannot store indexer" in seen["refusals"]["nsa file"]
    else:
        assert seen["refusals"]["nsa file"] == "attached"
    assert seen["refusals"]["mla file"] == "attached"


def test_a_directory_is_for_one_layout_of_the_kv_beside_an_index(seen: dict[str, Any]) -> None:
    assert "stored with layout = 'page_first'" in seen["refusals"]["nsa other layout"]


def test_an_unpatched_release_serves_models_without_an_index(seen_unpatched: dict[str, Any]) -> None:
    assert seen_unpatched["plain_models_dynamic"] == {"mha": WHOLE, "mla": WHOLE}


def test_an_unpatched_release_is_refused_for_a_model_with_an_index(seen_unpatched: dict[str, Any]) -> None:
    assert "run `ucm-sglang patch apply`" in seen_unpatched["refusals"]["nsa"]
