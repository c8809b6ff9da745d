# SPDX-License-Identifier: MIT
"""Copies of the installed SGLang that a test may patch; unpatched, whatever the installed one is."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from ucm.patching.installation import Installation, find_by_directory, find_by_search_path
from ucm.patching.patch_set import PatchSet, patch_sets_directory
from ucm.patching.patcher import Patcher

if TYPE_CHECKING:
    from pathlib import Path


def installed_patch_set() -> PatchSet:
    """Return the patch set for the SGLang that this interpreter imports."""
    return PatchSet.read(patch_sets_directory() / find_by_search_path().version)


def copy_patched_files(site_packages: Path) -> Installation:
    """Install a part of SGLang below `site_packages`: its metadata and the files that its patches change."""
    installation = find_by_search_path()
    package = site_packages / "sglang"
    for path in installed_patch_set().paths:
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(installation.package / path, package / path)
    _copy_metadata(installation, site_packages)
    return _pristine(package)


def link_package(site_packages: Path) -> Installation:
    """Install all of SGLang below `site_packages`, as hard links to the installed files where possible.

    The files that its patches change are copies: a test that goes wrong must not write through a link.
    """
    installation = find_by_search_path()
    package = site_packages / "sglang"
    patched = {str(installation.package / path) for path in installed_patch_set().paths}

    def link_or_copy(source: str, target: str) -> None:
        if source not in patched:
            with contextlib.suppress(OSError):  # Another file system, or one without hard links.
                os.link(source, target)
                return
        shutil.copy2(source, target)

    shutil.copytree(installation.package, package, copy_function=link_or_copy)
    _copy_metadata(installation, site_packages)
    return _pristine(package)


def _copy_metadata(installation: Installation, site_packages: Path) -> None:
    name = f"sglang-{installation.version}.dist-info"
    shutil.copytree(installation.package.parent / name, site_packages / name)


def _pristine(package: Path) -> Installation:
    """Undo the patches, in case the SGLang that was copied is patched."""
    installation = find_by_directory(package)
    Patcher(installed_patch_set(), installation).revert()
    return installation
