# SPDX-License-Identifier: MIT
"""The whole scenario of `ucm-sglang validate` against a served DeepSeek V4, and again after a restart.

A tiny one on the CPU platform, or with `--device cuda --model-path <path> --tp <n>` a real one on GPUs:
everything but the platform and the model is the same. `docs/gpu.md` describes the latter.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sglang_cpu.tiny_models import WRITERS

from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.deepseek_v4 import page_bytes
from ucm.testing.gpu_deployment import GpuDeployment
from ucm.testing.served_model import ServedModel
from ucm.testing.sglang_selection import Selection
from ucm.validation.results import CachedTokens, Continuation, Phase, Report
from ucm.validation.scenario import Settings
from ucm.validation.validate import Surroundings, validate, validate_after_restart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.testing.deployment import Deployment

# A real model takes minutes to load, and is loaded twice.
pytestmark = [pytest.mark.any_device, pytest.mark.timeout(7200)]

GPU_START_DEADLINE_S = 3600.0
LOGPROB_TOLERANCES = {"cpu": 1e-5, "cuda": 0.1}

FIRST_RUN = {
    "cold": CachedTokens(),
    "warm-l1": CachedTokens(device=512),
    "evicted-l2": CachedTokens(host=512),
    "flushed-l3": CachedTokens(storage=512),
    "longer-l3": CachedTokens(storage=512),
    "turn-1-cold": CachedTokens(),
    "turn-2-l1": CachedTokens(device=512),
    "turn-3-l3": CachedTokens(storage=768),
    "at-once-cold": CachedTokens(),
    "at-once-l3": CachedTokens(storage=4 * 512),
}
AFTER_RESTART = {
    "restart": CachedTokens(storage=512),
    "restart-longer": CachedTokens(storage=1024),
    "restart-turn-3": CachedTokens(storage=1024),
    "restart-at-once": CachedTokens(storage=4 * 512),
}


@dataclass(frozen=True)
class Validated:
    report: Report
    continuation: Continuation

    def phase(self, name: str) -> Phase:
        found = {phase.name: phase for phase in self.report.phases}
        if name == "evicted-l2" and name not in found:
            pytest.skip("filling L1 takes too many tokens: limit it (--server-args='--max-total-tokens N')")
        return found[name]


@pytest.fixture(scope="module")
def deployment(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, patched_sglang: Path
) -> Deployment:
    """The deployment that the command line asks for."""
    directory = tmp_path_factory.mktemp("scenario")
    if pytestconfig.getoption("--device") == "cpu":
        model = directory / "model"
        model.mkdir()
        WRITERS["deepseek_v4"](model, 0)
        return CpuDeployment(
            model=model,
            selection=Selection.PATCHED,
            sglang=patched_sglang,
            layout="page_first",
            chunk_tokens=-1,
            storage_roots=(directory / "kv",),
            extra_flags=("--max-total-tokens", "4096"),
        )
    storage: Path | None = pytestconfig.getoption("--storage-dir")
    return GpuDeployment(
        model=pytestconfig.getoption("--model-path"),
        selection=Selection.PATCHED,
        sglang=patched_sglang,
        layout="page_first",
        storage_roots=(
            # New, because an earlier run's pages would make a cold prompt warm.
            Path(tempfile.mkdtemp(prefix="ucm-e2e-", dir=storage)) if storage else directory / "kv",
        ),
        extra_flags=tuple(shlex.split(" ".join(pytestconfig.getoption("--server-args")))),
        start_deadline_s=GPU_START_DEADLINE_S,
        tp=pytestconfig.getoption("--tp"),
    )


@pytest.fixture(scope="module")
def settings(pytestconfig: pytest.Config) -> Settings:
    """What counts as the same answer: on GPUs, the shape of a batch changes the last bits."""
    device = pytestconfig.getoption("--device")
    tolerance = pytestconfig.getoption("--logprob-tolerance")
    return Settings(
        logprob_tolerance=LOGPROB_TOLERANCES[device] if tolerance is None else tolerance,
        same_tokens=device == "cpu" or pytestconfig.getoption("--same-tokens"),
    )


@pytest.fixture(scope="module")
def served(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """The running deployment."""
    with ServedModel(deployment, tmp_path_factory.mktemp("logs"), seed=7) as model:
        yield model


@pytest.fixture(scope="module")
def first_run(served: ServedModel, settings: Settings) -> Validated:
    """The scenario on the server as it was started first."""
    surroundings = Surroundings(selection=served.deployment.selection.value)
    return Validated(*validate(served.client, settings, surroundings, seed=8, say=print))


@pytest.fixture(scope="module")
def after_restart(served: ServedModel, first_run: Validated, settings: Settings) -> Validated:
    """The scenario's prompts on the restarted server."""
    served.server.restart()
    return Validated(
        *validate_after_restart(
            served.client, first_run.continuation, settings, Surroundings(), seed=9, say=print
        )
    )


@pytest.mark.parametrize("name", FIRST_RUN)
def test_every_tier_gives_all_that_is_restorable(name: str, first_run: Validated) -> None:
    phase = first_run.phase(name)
    assert phase.cached == FIRST_RUN[name]
    assert phase.problems == ()


def test_six_pools_have_the_page_sizes_that_the_configuration_implies(
    served: ServedModel, first_run: Validated
) -> None:
    config = json.loads((served.deployment.model / "config.json").read_text())
    drafting = "--speculative-algorithm" in served.deployment.extra_flags
    expected = page_bytes(config, drafting=drafting)
    assert {pool.name: pool.page_bytes for pool in first_run.report.pools} == expected


@pytest.mark.parametrize("name", AFTER_RESTART)
def test_a_restarted_server_restores_from_storage(name: str, after_restart: Validated) -> None:
    phase = after_restart.phase(name)
    assert phase.cached == AFTER_RESTART[name]
    assert phase.problems == ()
