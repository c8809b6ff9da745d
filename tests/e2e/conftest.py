# SPDX-License-Identifier: MIT
"""What every end-to-end test needs once: models and a patched SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_cpu.tiny_models import WRITERS

from ucm.testing.sglang_release import unpack_patched_release, unpack_release
from ucm.testing.sglang_selection import patched_copy

if TYPE_CHECKING:
    from pathlib import Path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        return
    cpu_only = pytest.mark.skip(reason="serves a tiny model on the CPU platform; left out with --device cuda")
    for item in items:
        if item.get_closest_marker("any_device") is None:
            item.add_marker(cpu_only)


@pytest.fixture(scope="session")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5: full attention and recurrent layers."""
    directory = tmp_path_factory.mktemp("qwen3_5")
    WRITERS["qwen3_5"](directory, 0)
    return directory


@pytest.fixture(scope="session")
def patched_sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched copy of the installed SGLang, or of the release that `--sglang` names."""
    site_packages = tmp_path_factory.mktemp("patched")
    if release := request.config.getoption("--sglang"):
        return unpack_patched_release(release, site_packages).package
    return patched_copy(site_packages)


@pytest.fixture(scope="session")
def released_sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The release that `--sglang` names, as it is; None stands for the installed one."""
    if release := request.config.getoption("--sglang"):
        return unpack_release(release, tmp_path_factory.mktemp("released")).package
    return None
