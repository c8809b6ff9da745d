# SPDX-License-Identifier: MIT
"""Copies of SGLang releases other than the installed one, for processes that put them first on their path."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

from ucm.patching.installation import Installation, find_by_directory
from ucm.patching.patch_set import PatchSet, patch_sets_directory
from ucm.patching.patcher import Patcher

_REPOSITORY = Path(__file__).resolve().parents[2]

WITHOUT_PATCH = "UCM_TEST_WITHOUT_PATCH"
"""Environment variable: `scripts/check_patches.py --needed` names the patch that tests do without."""


def unpack(wheel: Path, site_packages: Path) -> Installation:
    """Install a wheel's files below `site_packages`, and nothing that it requires."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    return find_by_directory(site_packages / "sglang")


def apply_patches(installation: Installation, without: str = "") -> None:
    """Patch a copy with its release's set, except for one patch if it is named."""
    patches = PatchSet.read(patch_sets_directory() / installation.version)
    Patcher(patches.without(without) if without else patches, installation).apply()


def environment(installation: Installation) -> dict[str, str]:
    """Return an environment in which Python imports this copy, and our packages as this process does."""
    ours = [str(_REPOSITORY), str(_REPOSITORY / "plugins" / "sglang-cpu" / "src")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    path = os.pathsep.join([str(installation.package.parent), *ours])
    # Each process has one rank, and the machine few cores.
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def python(*arguments: str) -> list[str]:
    """Return the command of a Python process."""
    return [sys.executable, *arguments]
