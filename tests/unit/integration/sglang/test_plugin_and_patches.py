# SPDX-License-Identifier: MIT
"""The backend by its name, through the patches and through the plugin: the same server either way.

Each way is observed in a process of its own, `plugin_probe.py`, on a copy of the installed SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.patching.patcher import Patcher
from ucm.testing.sglang_copy import installed_patch_set, link_package

if TYPE_CHECKING:
    from ucm.patching.installation import Installation

STORE = "ucm.integration.sglang.unifiedcache_store.UnifiedCacheStore"
PROBE = Path(__file__).parent / "plugin_probe.py"
TIMEOUT_S = 300


def run_python(sglang: Installation, plugins: str, *arguments: str) -> str:
    """Run Python on this SGLang with the named plugins; return what it prints last."""
    answer = subprocess.run(  # noqa: S603 # The command is the tests' own.
        [sys.executable, *arguments],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
            "PYTHONPATH": os.pathsep.join([str(sglang.package.parent), os.environ.get("PYTHONPATH", "")]),
            "SGLANG_PLUGINS": plugins,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """An SGLang as released."""
    return link_package(tmp_path_factory.mktemp("unpatched"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A patched SGLang; `scripts/check_patches.py --needed` has it left without one of the patches."""
    installation = link_package(tmp_path_factory.mktemp("patched"))
    patches = installed_patch_set()
    if without := os.environ.get("UCM_TEST_WITHOUT_PATCH"):
        patches = patches.without(without)
    Patcher(patches, installation).apply()
    return installation


@pytest.fixture(scope="module", params=["patches", "plugin"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang makes of the backend's name: patched and without our plugin, or with the plugin alone."""
    if request.param == "patches":
        sglang, plugins = request.getfixturevalue("patched"), "none-of-them"
    else:
        sglang, plugins = request.getfixturevalue("unpatched"), "ucm"
    storage = tmp_path_factory.mktemp("storage")
    observations: dict[str, Any] = json.loads(run_python(sglang, plugins, str(PROBE), str(storage)))
    return observations


def test_the_command_line_accepts_unifiedcache(seen: dict[str, Any]) -> None:
    assert seen["accepted"] == "unifiedcache"


def test_the_command_line_takes_other_names_as_before(seen: dict[str, Any]) -> None:
    assert seen["file accepted"] == "file"
    assert seen["unknown accepted"] == "SystemExit"


def test_the_factory_builds_our_store(seen: dict[str, Any]) -> None:
    assert seen["attached"]["class"] == STORE


def test_pages_are_read_and_written_in_place(seen: dict[str, Any]) -> None:
    assert seen["attached"]["get"] == "_page_get_zero_copy"
    assert seen["attached"]["set"] == "_page_set_zero_copy"


def test_layer_first_becomes_a_page_first_layout(seen: dict[str, Any]) -> None:
    assert seen["layout"] == {"kernel": "page_first", "direct": "page_first_direct"}


def test_layer_first_stays_for_other_backends(seen: dict[str, Any]) -> None:
    assert seen["layout of file"] == "layer_first"


def test_every_rank_writes_its_own_draft_pages(seen: dict[str, Any]) -> None:
    """The draft pool is of multi-head attention; its sliding-window twin of latent attention is a replica."""
    assert seen["written on rank 1"] == {"draft": True, "draft_swa": False, "indexer": False, "mamba": True}


def test_drafts_of_other_backends_are_written_as_before(seen: dict[str, Any]) -> None:
    assert seen["written on rank 1 by file"]["draft"] is False


def test_the_plugin_does_nothing_on_a_patched_sglang(patched: Installation) -> None:
    code = (
        "import json; from sglang.srt.plugins import HookRegistry, load_plugins; load_plugins();"
        "print(json.dumps(list(HookRegistry._hooks)))"
    )
    assert json.loads(run_python(patched, "ucm", "-c", code)) == []


def test_a_process_without_scheduler_is_not_made_to_import_one(unpatched: Installation) -> None:
    code = (
        "import json, sys; from sglang.srt.plugins import load_plugins; load_plugins();"
        "print(json.dumps([name in sys.modules for name in"
        " ('ucm.integration.sglang.plugin', 'sglang.srt.managers.cache_controller', 'ucm.store.posix')]))"
    )
    assert json.loads(run_python(unpatched, "ucm", "-c", code)) == [True, False, False]
