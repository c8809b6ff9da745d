# SPDX-License-Identifier: MIT
"""What may be imported where, seen from a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pkgutil import walk_packages
from typing import TYPE_CHECKING

import pytest

import ucm.cli
import ucm.store

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

_PROBE = """
import importlib, json, logging, os, sys, threading
importlib.import_module(sys.argv[1])
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "threads": [thread.name for thread in threading.enumerate()],
    "files": os.listdir("."),
    "handlers": [str(h) for name in (None, "ucm") for h in logging.getLogger(name).handlers],
}))
"""


def importing(module: str, directory: Path) -> dict[str, list[str]]:
    """Import `module` in an interpreter of its own and return what that did."""
    # The parent's environment stays: a clean one could hide what an operator's setting does.
    probe = subprocess.run(  # noqa: S603 -- Our own interpreter and module names.
        [sys.executable, "-c", _PROBE, module], cwd=directory, check=True, capture_output=True, text=True
    )
    result: dict[str, list[str]] = json.loads(probe.stdout)
    return result


def modules_of(package: ModuleType) -> list[str]:
    return [package.__name__, *(m.name for m in walk_packages(package.__path__, f"{package.__name__}."))]


WITHOUT_SGLANG = [
    *modules_of(ucm.store),
    *modules_of(ucm.cli),
    "ucm.integration.sglang.config",
    "ucm.integration.sglang.errors",
    "ucm.integration.sglang.namespace",
    "ucm.integration.sglang.plugin",
    "ucm.integration.sglang.restorable",
]


@pytest.mark.parametrize("module", WITHOUT_SGLANG)
def test_it_needs_neither_torch_nor_sglang(module: str, tmp_path: Path) -> None:
    assert not {"torch", "sglang"} & set(importing(module, tmp_path)["modules"])


@pytest.mark.parametrize(
    "module",
    [
        "ucm.store.factory",
        "ucm.cli.main",
        "ucm.integration.sglang.namespace",
        "ucm.integration.sglang.plugin",
    ],
)
def test_importing_it_has_no_side_effect(module: str, tmp_path: Path) -> None:
    effect = importing(module, tmp_path)

    assert effect["threads"] == ["MainThread"]
    assert effect["files"] == []
    assert effect["handlers"] == []


def test_importing_the_backend_starts_nothing_of_ours(tmp_path: Path) -> None:
    effect = importing("ucm.integration.sglang.unifiedcache_store", tmp_path)

    assert [name for name in effect["threads"] if name.startswith("ucm")] == []
    assert effect["files"] == []
