# SPDX-License-Identifier: MIT
"""How servers are started, on both platforms."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sglang_cpu.tiny_models import WRITERS

from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.gpu_deployment import GpuDeployment
from ucm.testing.sglang_selection import Selection

if TYPE_CHECKING:
    from ucm.testing.deployment import Deployment

CACHE_FLAGS = (
    "--enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy write_through "
    "--hicache-storage-prefetch-policy wait_complete --hicache-mem-layout page_first "
    "--hicache-io-backend kernel --hicache-storage-backend unifiedcache "
    """--hicache-storage-backend-extra-config '{"storage_backends": ["/mnt/kv"]}'"""
)


@pytest.fixture
def gpu() -> GpuDeployment:
    return GpuDeployment(
        model=Path("/models/flash"),
        selection=Selection.PATCHED,
        sglang=Path("/tmp/patched/sglang"),
        layout="page_first",
        storage_roots=(Path("/mnt/kv"),),
        extra_flags=("--mem-fraction-static", "0.8"),
        tp=8,
    )


@pytest.fixture
def cpu(tmp_path: Path) -> CpuDeployment:
    WRITERS["deepseek_v4"](tmp_path, 0)
    return CpuDeployment(
        model=tmp_path,
        selection=Selection.PATCHED,
        sglang=Path("/tmp/patched/sglang"),
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(Path("/mnt/kv"),),
    )


def test_a_server_on_gpus_is_started_as_an_operator_does_it(gpu: GpuDeployment) -> None:
    assert shlex.join(gpu.command(30000)) == (
        f"{sys.executable} -m sglang.launch_server --model-path /models/flash --host 127.0.0.1 --port 30000 "
        f"--tp 8 {CACHE_FLAGS} --mem-fraction-static 0.8"
    )


def test_a_server_on_gpus_has_only_the_patch_to_get_the_backend_from(
    gpu: GpuDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = gpu.environment()
    assert "SGLANG_PLATFORM" not in environment
    assert environment["SGLANG_PLUGINS"] == "none"
    assert environment["PYTHONPATH"] == "/tmp/patched"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_both_platforms_cache_with_the_same_flags(platform: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(platform)
    assert CACHE_FLAGS in shlex.join(deployment.command(1))


def test_page_first_direct_is_moved_by_the_direct_backend(gpu: GpuDeployment) -> None:
    words = GpuDeployment(
        model=gpu.model,
        selection=Selection.PLUGIN,
        sglang=None,
        layout="page_first_direct",
        storage_roots=gpu.storage_roots,
        tp=1,
    ).command(1)
    assert words[words.index("--hicache-io-backend") + 1] == "direct"


def test_another_release_is_imported_before_the_installed_one_whatever_gives_it_the_backend(
    cpu: CpuDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    release = Path("/tmp/released/sglang")
    environment = replace(cpu, selection=Selection.PLUGIN, sglang=release).environment()
    assert environment["PYTHONPATH"] == "/tmp/released:/ours"
    assert environment["SGLANG_PLUGINS"] == "cpu_reference,ucm"
    installed = replace(cpu, selection=Selection.PLUGIN, sglang=None).environment()
    assert installed["PYTHONPATH"] == "/ours"
