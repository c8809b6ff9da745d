# SPDX-License-Identifier: MIT
"""SGLang's entry points: silent on any other platform, complete on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from sglang_cpu import PLATFORM_NAME, hooks, launch, plugin

SELECTED_SERVER_PROCESS = Path(__file__).with_name("selected_server_process.py")


@pytest.mark.parametrize("group", ["sglang.srt.platforms", "sglang.srt.plugins"])
def test_sglang_finds_the_package(group: str) -> None:
    assert PLATFORM_NAME in {entry_point.name for entry_point in entry_points(group=group)}


@pytest.mark.parametrize("selected", [None, "another_platform"])
def test_an_installed_package_leaves_other_platforms_alone(
    selected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    monkeypatch.setattr(hooks, "_wanted", {})
    environment = dict(os.environ)

    assert plugin.activate() is None
    plugin.register()

    assert dict(os.environ) == environment
    assert not hooks._wanted


def test_the_selected_platform_replaces_everything_it_promises() -> None:
    finished = subprocess.run(
        [sys.executable, str(SELECTED_SERVER_PROCESS)],
        env=launch.environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "target", ["sglang.srt.no_such_module.function", "sglang.srt.environ.no_such_function"]
)
def test_a_function_that_sglang_no_longer_has_is_reported_by_name(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_wanted", {target: print})

    with pytest.raises(RuntimeError, match=target):
        hooks.apply()
    # SGLang logs what a plugin raises and goes on: the platform looks again when the model is loaded.
    with pytest.raises(RuntimeError, match=target):
        hooks.verify()


def test_the_operators_own_switches_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM_NAME)
    monkeypatch.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "1")

    assert plugin.activate() == "sglang_cpu.platform:CpuReferencePlatform"

    assert os.environ["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "1"
