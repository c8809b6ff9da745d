# SPDX-License-Identifier: MIT
"""Which end-to-end tests run on GPUs, without starting any server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCENARIO = "tests/e2e/test_deepseek_v4_scenario.py"


def plan(*options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest up to, but not including, fixtures and tests."""
    command = [sys.executable, "-m", "pytest", "tests/e2e", "-p", "no:cacheprovider", "--setup-plan"]
    return subprocess.run(  # noqa: S603 # Our own tests.
        [*command, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The plan of a run on GPUs."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    process = plan("-k", "mamba or deepseek_v4", "--device", "cuda", "--model-path", str(model), "--tp", "8")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_the_scenario_runs_on_gpus(on_gpus: str) -> None:
    assert f"{SCENARIO}::test_every_tier_gives_all_that_is_restorable[cold]" in on_gpus
    assert f"{SCENARIO}::test_a_restarted_server_restores_from_storage[restart]" in on_gpus


def test_everything_that_serves_tiny_models_is_skipped_there_with_the_reason(on_gpus: str) -> None:
    skipped = re.findall(r"^SKIPPED \[\d+\] (\S+?):(?:\d+:)? (.*)$", on_gpus, re.MULTILINE)
    assert {Path(path).name for path, _ in skipped} >= {"test_mamba.py", "test_deepseek_v4_flash43.py"}
    assert SCENARIO not in {path for path, _ in skipped}
    assert {reason for _, reason in skipped} == {
        "serves a tiny model on the CPU platform; left out with --device cuda"
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--device", "cuda"), "needs --model-path"),
        (("--device", "cuda", "--model-path", "/nowhere"), "got /nowhere"),
        (("--model-path", "/nowhere"), "needs --device cuda"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: tuple[str, ...], reason: str) -> None:
    process = plan(*options)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert reason in process.stderr
