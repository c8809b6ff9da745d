# SPDX-License-Identifier: MIT
"""Servers that share a directory with a running one: one that does not fit, and one of another model.

The models are tiny Qwen3.5s that differ in their weights only: the same prompts have the same page hashes,
and pages of the same size.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sglang_cpu.launch import ServerFailedError
from sglang_cpu.tiny_models import WRITERS

from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.served_model import ServedModel
from ucm.testing.sglang_selection import Selection
from ucm.validation.results import Answer, CachedTokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucm.validation.client import Reply

PROMPT_TOKENS = 298
RESTORABLE_TOKENS = 256
LOGPROB_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, qwen3_5: Path, released_sglang: Path | None
) -> CpuDeployment:
    """The first server of the directory."""
    return CpuDeployment(
        model=qwen3_5,
        selection=Selection.PLUGIN,
        sglang=released_sglang,
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(tmp_path_factory.mktemp("neighbours") / "kv",),
    )


@pytest.fixture(scope="module")
def served(deployment: CpuDeployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """The first server, running."""
    with ServedModel(deployment, tmp_path_factory.mktemp("first"), seed=41) as server:
        yield server


@pytest.fixture(scope="module")
def neighbour(
    served: ServedModel, deployment: CpuDeployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    """A server of another model, running at the same time."""
    assert served
    directory = tmp_path_factory.mktemp("neighbour")
    (directory / "model").mkdir()
    WRITERS["qwen3_5"](directory / "model", 1)
    with ServedModel(replace(deployment, model=directory / "model"), directory, seed=42) as server:
        yield server


def assert_same_answer(answer: Answer, reference: Answer) -> None:
    assert answer.tokens == reference.tokens
    assert reference.max_abs_logprob_delta(answer) <= LOGPROB_TOLERANCE


def generate_on_each(servers: list[ServedModel], prompts: list[tuple[int, ...]]) -> list[list[Reply]]:
    """Send all prompts to all servers at once; return the replies of each server."""
    with ThreadPoolExecutor(len(servers) * len(prompts)) as executor:
        futures = [[executor.submit(server.generate, prompt) for prompt in prompts] for server in servers]
        return [[future.result() for future in replies] for replies in futures]


def test_a_server_with_another_kv_dtype_is_refused_at_start_and_told_why(
    served: ServedModel, deployment: CpuDeployment, tmp_path: Path
) -> None:
    stored = served.store(served.prompts.take(PROMPT_TOKENS))
    other = replace(deployment, extra_flags=("--kv-cache-dtype", "fp8_e4m3"))

    with pytest.raises(ServerFailedError), ServedModel(other, tmp_path, seed=43):
        pass

    log = (tmp_path / "server-1.log").read_text()
    reason = next(line for line in log.splitlines() if line.startswith("ucm.store.errors.StoreConfigError: "))
    for part in ("identity", "dtype = 'bfloat16'", "'fp8_e4m3'", "use another storage directory"):
        assert part in reason
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=RESTORABLE_TOKENS)
    assert_same_answer(reply.answer, stored.answer)


def test_two_models_store_the_same_prompts_at_once_and_each_gets_its_own_back(
    served: ServedModel, neighbour: ServedModel
) -> None:
    servers = [served, neighbour]
    prompts = [served.prompts.take(PROMPT_TOKENS) for _ in range(4)]
    backups = served.watch_backups()
    backups.expect(len(servers) * len(prompts) * RESTORABLE_TOKENS // served.profile.page_tokens)
    computed = generate_on_each(servers, prompts)
    backups.settle()
    for server in servers:
        server.client.flush_cache()
    restored = generate_on_each(servers, prompts)

    for cold, warm in zip(computed, restored, strict=True):
        assert [reply.cached for reply in cold] == [CachedTokens()] * len(prompts)
        assert [reply.cached for reply in warm] == [CachedTokens(storage=RESTORABLE_TOKENS)] * len(prompts)
        for reply, reference in zip(warm, cold, strict=True):
            assert_same_answer(reply.answer, reference.answer)
    # Or it would not show whose pages a server got.
    for one, other in zip(*computed, strict=True):
        assert one.answer.tokens != other.answer.tokens
