# SPDX-License-Identifier: MIT
"""A real server with a MAMBA hybrid: reuse from every tier, restart, damage, replicas.

Two deployments cover both layouts, whole and chunked prefill, and two ways of selecting the backend; a
replica of the first covers the third way. A third one, with the native store of UCM's own package, is
left to `nox -s native`. Each server is started once and restarted once; tests run in the
order of this file, and every prompt is new, so that they do not depend on each other.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

import pytest

from ucm.testing import block_damage, native_ucm
from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.page_hashes import page_hashes
from ucm.testing.restartable_server import thread_names
from ucm.testing.served_model import ServedModel, StoredPrompt, wait_for_blocks, wait_until
from ucm.testing.sglang_selection import Selection
from ucm.testing.stored_blocks import StoredBlocks
from ucm.validation.results import Answer, CachedTokens, Continuation, Report
from ucm.validation.scenario import Settings
from ucm.validation.validate import Surroundings, validate, validate_after_restart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ucm.validation.client import Reply

PAGE_TOKENS = 64
PROMPT_TOKENS = 298
RESTORABLE_TOKENS = 256
LOGPROB_TOLERANCE = 1e-5
MAX_IO_THREADS = 16

POOLS = ["kv", "mamba"]

FIRST_RUN = {
    "cold": CachedTokens(),
    "warm-l1": CachedTokens(device=256),
    "evicted-l2": CachedTokens(host=256),
    "flushed-l3": CachedTokens(storage=256),
    "longer-l3": CachedTokens(storage=256),
    "turn-1-cold": CachedTokens(),
    "turn-2-l1": CachedTokens(device=256),
    "turn-3-l3": CachedTokens(storage=320),
    "at-once-cold": CachedTokens(),
    "at-once-l3": CachedTokens(storage=4 * 256),
}
AFTER_RESTART = {
    "restart": CachedTokens(storage=256),
    "restart-longer": CachedTokens(storage=384),
    "restart-turn-3": CachedTokens(storage=384),
    "restart-at-once": CachedTokens(storage=4 * 256),
}

DAMAGES: list[Callable[[Path], None]] = [
    block_damage.flip_payload,
    block_damage.flip_footer,
    block_damage.cut,
    block_damage.empty,
    block_damage.zero,
    block_damage.remove,
]


@dataclass(frozen=True)
class Validated:
    report: Report
    continuation: Continuation


@pytest.fixture(scope="module", params=["patched", "plugin", pytest.param("native", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    qwen3_5: Path,
    patched_sglang: Path,
    released_sglang: Path | None,
) -> Iterator[ServedModel]:
    """The running deployment that a test is about."""
    directory = tmp_path_factory.mktemp(request.param)
    patched = CpuDeployment(
        model=qwen3_5,
        selection=Selection.PATCHED,
        sglang=patched_sglang,
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(directory / "kv",),
    )
    plugin = replace(
        patched,
        selection=Selection.PLUGIN,
        sglang=released_sglang,
        layout="page_first_direct",
        # Up to 0.5.21, SGLang does not back up what a chunk of a prefill inserts as soon as it does.
        chunk_tokens=-1 if released_sglang else 128,
        storage_roots=(directory / "kv-a", directory / "kv-b"),
    )
    native = replace(
        plugin,
        storage_roots=(directory / "kv",),
        storage_options={"engine": "native", "native_package": str(native_ucm.directory())},
    )
    if request.param == "native" and native_ucm.directory() is None:
        pytest.skip("UCM's own package is not installed; nox -s native does that")
    deployment = {"patched": patched, "plugin": plugin, "native": native}[request.param]
    with ServedModel(deployment, directory, seed=1) as model:
        yield model


@pytest.fixture(scope="module")
def first_run(served: ServedModel) -> Validated:
    """The scenario on the server as it was started first."""
    surroundings = Surroundings(selection=served.deployment.selection.value)
    return Validated(*validate(served.client, Settings(), surroundings, seed=2, say=print))


@pytest.fixture(scope="module")
def after_restart(served: ServedModel, first_run: Validated) -> Validated:
    """The scenario's prompts on the restarted server."""
    served.server.restart()
    return Validated(
        *validate_after_restart(
            served.client, first_run.continuation, Settings(), Surroundings(), seed=3, say=print
        )
    )


@pytest.fixture(scope="module")
def replica(
    served: ServedModel, tmp_path_factory: pytest.TempPathFactory, released_sglang: Path | None
) -> Iterator[ServedModel]:
    """A second server on the same directory, which gets the backend by `dynamic` loading."""
    deployment = replace(served.deployment, selection=Selection.DYNAMIC, sglang=released_sglang)
    with ServedModel(deployment, tmp_path_factory.mktemp("replica"), seed=4) as model:
        yield model


def assert_same_answer(answer: Answer, reference: Answer) -> None:
    assert answer.tokens == reference.tokens
    assert reference.max_abs_logprob_delta(answer) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", FIRST_RUN)
def test_every_tier_gives_all_that_is_restorable(name: str, first_run: Validated) -> None:
    (phase,) = (phase for phase in first_run.report.phases if phase.name == name)
    assert phase.cached == FIRST_RUN[name]
    assert phase.problems == ()
    assert phase.max_abs_logprob_delta <= LOGPROB_TOLERANCE


def test_both_pools_are_stored_below_their_own_namespace(first_run: Validated) -> None:
    pools = {pool.name: (pool.namespace, pool.page_bytes) for pool in first_run.report.pools}
    assert pools == {"kv": ("", 16384), "mamba": ("sglang_v2/mamba_53760x1", 53760)}


@pytest.mark.slow
@pytest.mark.parametrize("served", ["native"], indirect=True)
def test_it_is_the_native_store_that_stores(served: ServedModel, first_run: Validated) -> None:
    assert first_run.report.ok
    [root] = served.deployment.storage_roots
    # What it leaves in every directory it keeps blocks in.
    assert sorted(str(path.parent.relative_to(root)) for path in root.rglob(".ucm_gc.config")) == [
        ".",
        "sglang_v2/mamba_53760x1",
    ]


def test_the_backend_adds_at_most_16_threads(served: ServedModel, first_run: Validated) -> None:
    (scheduler,) = served.server.scheduler_pids()
    ours = [name for name in thread_names(scheduler) if name.startswith("ucm-io")]
    assert first_run.report.ok
    assert 1 <= len(ours) <= MAX_IO_THREADS


@pytest.mark.parametrize("length", [319, 320, 321, 384, 385])
def test_validation_expects_what_a_prompt_of_any_length_restores(length: int, served: ServedModel) -> None:
    stored = served.store(served.prompts.take(length))
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=served.profile.storage_tokens(length, length))
    assert_same_answer(reply.answer, stored.answer)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_block_is_a_miss_and_the_answer_is_right(
    damage: Callable[[Path], None], pool: str, served: ServedModel
) -> None:
    stored = served.store(served.prompts.take(PROMPT_TOKENS))
    for block in needed_blocks(stored, pool):
        damage(block)
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens()
    assert_same_answer(reply.answer, stored.answer)


@pytest.mark.parametrize("pool", POOLS)
def test_the_block_of_another_key_is_a_miss(pool: str, served: ServedModel) -> None:
    other = served.store(served.prompts.take(PROMPT_TOKENS))
    stored = served.store(served.prompts.take(PROMPT_TOKENS))
    for block in needed_blocks(stored, pool):
        shutil.copyfile(other.blocks[pool][0], block)
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens()
    assert_same_answer(reply.answer, stored.answer)


@pytest.mark.parametrize("pool", POOLS)
def test_a_damaged_block_is_written_anew(pool: str, served: ServedModel) -> None:
    stored = served.store(served.prompts.take(PROMPT_TOKENS))
    good = {block: block.read_bytes() for block in needed_blocks(stored, pool)}
    for block in good:
        block_damage.flip_payload(block)
    served.generate(stored.prompt)
    # Only what was read is known to be damaged: of several states, the last.
    wait_until(
        lambda: any(holds(block, content) for block, content in good.items()),
        f"a block of {pool} holds again what was stored first",
    )

    def is_restored() -> bool:
        served.client.flush_cache()
        return served.generate(stored.prompt).cached == CachedTokens(storage=RESTORABLE_TOKENS)

    wait_until(is_restored, "all of the prompt is restored again")


def holds(block: Path, content: bytes) -> bool:
    try:
        return block.read_bytes() == content
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("pool", POOLS)
def test_what_a_block_holds_shows_in_the_answer(pool: str, served: ServedModel) -> None:
    # Without this, the tests above would pass for a pool whose bytes do not matter.
    stored = served.store(served.prompts.take(PROMPT_TOKENS))
    for block in stored.blocks[pool]:
        block_damage.forge(block)
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=RESTORABLE_TOKENS)
    assert stored.answer.max_abs_logprob_delta(reply.answer) > 1000 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", AFTER_RESTART)
def test_a_restarted_server_restores_from_storage(name: str, after_restart: Validated) -> None:
    (phase,) = (phase for phase in after_restart.report.phases if phase.name == name)
    assert phase.cached == AFTER_RESTART[name]
    assert phase.problems == ()
    assert phase.max_abs_logprob_delta <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("served", ["patched"], indirect=True)
def test_a_replica_restores_as_much_as_a_lone_server_on_a_warm_directory(
    after_restart: Validated, replica: ServedModel, first_run: Validated
) -> None:
    report, _ = validate_after_restart(
        replica.client, first_run.continuation, Settings(), Surroundings(), seed=3, say=print
    )
    assert report.ok
    assert [(phase.name, phase.cached) for phase in report.phases] == [
        (phase.name, phase.cached) for phase in after_restart.report.phases
    ]


@pytest.mark.parametrize("served", ["patched"], indirect=True)
def test_a_replica_restores_a_prompt_while_the_other_server_writes_the_next_ones(
    served: ServedModel, after_restart: Validated, replica: ServedModel
) -> None:
    assert after_restart.report.ok
    written: SimpleQueue[tuple[tuple[int, ...], Reply]] = SimpleQueue()
    read_enough = Event()

    def write() -> None:
        while not read_enough.is_set():
            prompt = served.prompts.take(PROMPT_TOKENS)
            written.put((prompt, served.generate(prompt)))

    with ThreadPoolExecutor(1) as executor:
        writer = executor.submit(write)
        try:
            for _ in range(8):
                prompt, cold = written.get(timeout=300)
                wait_for_blocks(blocks_of(prompt, served))
                reply = replica.generate(prompt)
                assert reply.cached == CachedTokens(storage=RESTORABLE_TOKENS)
                assert_same_answer(reply.answer, cold.answer)
        finally:
            read_enough.set()
        writer.result()


@pytest.mark.parametrize("served", ["patched"], indirect=True)
def test_a_replica_restores_what_another_server_stored(
    served: ServedModel, after_restart: Validated, replica: ServedModel
) -> None:
    assert after_restart.report.ok
    stored = served.store(served.prompts.take(PROMPT_TOKENS))
    reply = replica.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=RESTORABLE_TOKENS)
    assert_same_answer(reply.answer, stored.answer)


@pytest.mark.parametrize("served", ["patched"], indirect=True)
def test_a_server_restores_what_a_dynamic_replica_stored(
    served: ServedModel, after_restart: Validated, replica: ServedModel
) -> None:
    assert after_restart.report.ok
    stored = replica.store(replica.prompts.take(PROMPT_TOKENS))
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=RESTORABLE_TOKENS)
    assert_same_answer(reply.answer, stored.answer)


@pytest.mark.parametrize("served", ["patched"], indirect=True)
def test_replicas_that_store_the_same_prompts_at_once_do_not_disturb_each_other(
    served: ServedModel, after_restart: Validated, replica: ServedModel
) -> None:
    assert after_restart.report.ok
    prompts = [served.prompts.take(PROMPT_TOKENS) for _ in range(4)]
    backups = served.watch_backups()
    backups.expect(len(prompts) * RESTORABLE_TOKENS // PAGE_TOKENS)
    computed = generate_on_both(served, replica, prompts)
    backups.settle()
    served.client.flush_cache()
    replica.client.flush_cache()
    restored = generate_on_both(served, replica, prompts)
    assert [reply.cached.storage for reply in restored] == [RESTORABLE_TOKENS] * len(restored)
    for reply, reference in zip(restored, computed, strict=True):
        assert_same_answer(reply.answer, reference.answer)


def test_no_server_log_tells_of_an_exception(served: ServedModel, after_restart: Validated) -> None:
    assert after_restart.report.ok
    for log in served.server.logs:
        # While it shuts down, SGLang reports its own processes' end as an exception.
        serving, _, _ = log.read_text().partition("INFO:     Shutting down")
        assert [line for line in serving.splitlines() if "Traceback" in line or "ERROR" in line] == []


def needed_blocks(stored: StoredPrompt, pool: str) -> list[Path]:
    """Return the least whose loss leaves nothing of a prompt to restore: a page of KV, or every state."""
    return stored.blocks[pool][:1] if pool == "kv" else stored.blocks[pool]


def blocks_of(prompt: tuple[int, ...], served: ServedModel) -> list[Path]:
    """Return the files that a prompt leaves behind."""
    (root,) = served.deployment.storage_roots
    stored = StoredBlocks(root, served.profile.model)
    hashes = page_hashes(prompt, PAGE_TOKENS)
    return [*map(stored.primary, hashes), stored.sidecar("mamba_53760x1", hashes[-1])]


def generate_on_both(
    served: ServedModel, replica: ServedModel, prompts: list[tuple[int, ...]]
) -> list[Reply]:
    """Send all prompts to both servers at once."""
    with ThreadPoolExecutor(max_workers=2 * len(prompts)) as pool:
        replies = [pool.submit(model.generate, prompt) for prompt in prompts for model in (served, replica)]
        return [reply.result() for reply in replies]
