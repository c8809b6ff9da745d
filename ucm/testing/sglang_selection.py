# SPDX-License-Identifier: MIT
"""The three ways to make SGLang use our backend, without touching the installed SGLang."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from ucm.testing.sglang_copy import link_package

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Selection(enum.Enum):
    """How a server gets the backend."""

    PATCHED = "patched"
    PLUGIN = "plugin"
    DYNAMIC = "dynamic"


def patched_copy(site_packages: Path) -> Path:
    """Copy the installed SGLang below an empty directory and patch the copy, as an operator does; return it.

    Raises:
        subprocess.CalledProcessError: The patch was refused; its words are on stderr.
    """
    package = link_package(site_packages).package
    command = [sys.executable, "-m", "ucm.cli.main", "patch", "apply", "--sglang-dir", str(package)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)  # noqa: S603 # Our own command.
    return package


def backend_flags(
    selection: Selection, storage_roots: Sequence[Path], options: Mapping[str, object]
) -> list[str]:
    """Return the server flags that select the backend and say where and how it stores."""
    extra: dict[str, object] = {"storage_backends": [str(root) for root in storage_roots], **options}
    name = "unifiedcache"
    if selection is Selection.DYNAMIC:
        name = "dynamic"
        extra |= {
            "backend_name": "unifiedcache",
            "module_path": "ucm.integration.sglang.unifiedcache_store",
            "class_name": "UnifiedCacheStore",
            "interface_v1": 1,
        }
    return ["--hicache-storage-backend", name, "--hicache-storage-backend-extra-config", json.dumps(extra)]


def selection_environment(
    selection: Selection, *, sglang: Path | None, other_plugins: Sequence[str]
) -> dict[str, str]:
    """Return the environment in which a server can only have got the backend in this way.

    Args:
        selection: The way.
        sglang: Package directory of the SGLang to serve; None: the installed one. For the first way, what
            `patched_copy` returned.
        other_plugins: SGLang plugins to load beside ours, or instead of it.
    """
    plugins = [*other_plugins, "ucm"] if selection is Selection.PLUGIN else list(other_plugins)
    # An empty value would allow every plugin.
    environment = {"SGLANG_PLUGINS": ",".join(plugins) or "none"}
    if selection is Selection.PATCHED and sglang is None:
        raise ValueError("a patched SGLang is needed")
    if sglang is not None:
        paths = [str(sglang.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
