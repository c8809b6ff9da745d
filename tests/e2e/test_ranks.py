# SPDX-License-Identifier: MIT
"""Real servers with two TP ranks: what each rank stores and restores, and what the death of one leaves.

The tiny Qwen3.5 splits its KV and states over the ranks, the tiny DeepSeek V4 has the same pools on both.
Each is served by one rank first, for the answers, then by two ranks; one of these is killed while it stores,
and the server is started again. All use one directory.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
from sglang_cpu.tiny_models import WRITERS

from ucm.testing import block_damage
from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.page_hashes import page_hashes
from ucm.testing.served_model import ServedModel, wait_for_blocks
from ucm.testing.sglang_selection import Selection
from ucm.testing.stored_blocks import StoredBlocks
from ucm.validation.client import ServerError
from ucm.validation.prompts import PromptSource
from ucm.validation.results import Answer, CachedTokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ucm.validation.client import Reply

# The first test of a family waits for a server with one rank and one with two.
pytestmark = pytest.mark.timeout(1200)

RANKS = 2
LOGPROB_TOLERANCE = 1e-5
# More than fit into L1 together, so that some are computed only when others have been stored.
BURST = 8
_POLL_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, and what a prompt leaves on storage when two ranks serve it.

    Attributes:
        lengths: Of the prompts; all of their whole pages are stored, and restored.
        burst_tokens: Length of each of the prompts that are being stored when a rank dies.
        namespaces: By pool, the namespace of its blocks.
        last_page: Pools that keep the last page of a prompt only.
        split: Each rank has bytes of its own.
        victim: The rank that dies: of ranks that hold the same, the one that writes.
    """

    page_tokens: int
    layout: str
    flags: tuple[str, ...] = ()
    lengths: tuple[int, ...]
    burst_tokens: int
    namespaces: Mapping[str, str]
    last_page: frozenset[str]
    split: bool
    victim: int

    @property
    def owners(self) -> range:
        """The ranks that have bytes of their own."""
        return range(RANKS if self.split else 1)

    def restorable(self, tokens: int) -> int:
        """How many tokens of a stored prompt storage gives back."""
        return tokens // self.page_tokens * self.page_tokens


FAMILIES = {
    "qwen3_5": Family(
        page_tokens=64,
        layout="page_first",
        lengths=(298, 330, 450),
        burst_tokens=450,
        # A state of half the heads.
        namespaces={"kv": "", "mamba": "mamba_26880x1"},
        last_page=frozenset({"mamba"}),
        split=True,
        victim=1,
    ),
    "deepseek_v4": Family(
        page_tokens=256,
        layout="page_first_direct",
        flags=("--max-total-tokens", "4096"),
        lengths=(520, 600, 1100),
        burst_tokens=600,
        namespaces={
            "swa": "swa_748800x1",
            "deepseek_v4_c4": "deepseek_v4_c4_74880x1",
            "deepseek_v4_c4_indexer": "deepseek_v4_c4_indexer_16896x1",
            "deepseek_v4_c4_state": "deepseek_v4_c4_state_131072x1",
            "deepseek_v4_c4_indexer_state": "deepseek_v4_c4_indexer_state_32768x1",
            "deepseek_v4_c128": "deepseek_v4_c128_1728x1",
        },
        last_page=frozenset({"swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"}),
        split=False,
        victim=0,
    ),
}


@dataclass(frozen=True)
class Setting:
    """One family, its prompts, and where its servers store."""

    family: Family
    prompts: Mapping[int, tuple[int, ...]]
    one_rank: CpuDeployment
    directory: Path

    def blocks(self, prompt: tuple[int, ...], pool: str, rank: int) -> list[Path]:
        """Return the files in which a rank finds its part of a prompt, page after page."""
        stored = StoredBlocks(
            self.one_rank.storage_roots[0],
            str(self.one_rank.model),
            replicated=not self.family.split,
            tp_size=RANKS,
        )
        owner = rank if self.family.split else 0
        namespace = self.family.namespaces[pool]
        hashes = page_hashes(prompt, self.family.page_tokens)
        if pool in self.family.last_page:
            hashes = hashes[-1:]
        if not namespace:
            return [stored.primary(page_hash, owner) for page_hash in hashes]
        return [stored.sidecar(namespace, page_hash, owner) for page_hash in hashes]

    def all_blocks(self, prompt: tuple[int, ...]) -> set[Path]:
        """Return every file that a prompt leaves behind."""
        ranks, pools = range(RANKS), self.family.namespaces
        return {block for rank in ranks for pool in pools for block in self.blocks(prompt, pool, rank)}


@pytest.fixture(scope="module", params=FAMILIES)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The model that a test is about."""
    if request.config.getoption("--sglang"):
        pytest.skip("the CPU platform serves two ranks with the installed SGLang only")
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "model").mkdir()
    WRITERS[request.param](directory / "model", 0)
    family = FAMILIES[request.param]
    source = PromptSource(31, vocabulary=500)
    return Setting(
        family,
        {length: source.take(length) for length in family.lengths},
        CpuDeployment(
            model=directory / "model",
            selection=Selection.PLUGIN,
            sglang=None,
            layout=family.layout,
            chunk_tokens=-1,
            storage_roots=(directory.parent / "kv-of-all",),
            extra_flags=family.flags,
        ),
        directory,
    )


@pytest.fixture(scope="module")
def answers_of_one_rank(setting: Setting) -> dict[int, Answer]:
    """What a server with one rank answers to each prompt, with no cache."""
    with ServedModel(setting.one_rank, setting.directory / "one-rank", seed=1) as server:
        return {length: server.generate(prompt).answer for length, prompt in setting.prompts.items()}


@pytest.fixture(scope="module")
def served(setting: Setting, answers_of_one_rank: dict[int, Answer]) -> Iterator[ServedModel]:
    """The running server with two ranks."""
    assert answers_of_one_rank
    deployment = replace(setting.one_rank, tp=RANKS)
    with ServedModel(deployment, setting.directory / "two-ranks", seed=2) as server:
        yield server


def store(served: ServedModel, setting: Setting, prompt: tuple[int, ...]) -> Reply:
    """Compute a prompt, wait until both ranks have stored it, and drop it from L1 and L2."""
    reply = served.generate(prompt)
    wait_for_blocks(setting.all_blocks(prompt))
    served.client.flush_cache()
    return reply


@pytest.fixture(scope="module")
def computed(served: ServedModel, setting: Setting) -> dict[int, Reply]:
    """Each prompt as it was computed first; stored since."""
    return {length: store(served, setting, prompt) for length, prompt in setting.prompts.items()}


@pytest.fixture(scope="module")
def flushed(served: ServedModel, setting: Setting, computed: dict[int, Reply]) -> dict[int, Reply]:
    """Each prompt again, when only storage has it."""
    assert computed
    return {length: served.generate(prompt) for length, prompt in setting.prompts.items()}


def assert_same_answers(replies: Mapping[int, Reply], references: Mapping[int, Answer]) -> None:
    for length, reference in references.items():
        answer = replies[length].answer
        assert answer.tokens == reference.tokens
        assert reference.max_abs_logprob_delta(answer) <= LOGPROB_TOLERANCE


def storage_tokens(replies: Mapping[int, Reply]) -> dict[int, int]:
    """Return how many tokens of each prompt came from storage; no other tier may have had any."""
    assert all(reply.cached.total == reply.cached.storage for reply in replies.values())
    return {length: reply.cached.storage for length, reply in replies.items()}


def test_two_ranks_answer_as_one_does_and_use_nothing_of_it(
    computed: dict[int, Reply], answers_of_one_rank: dict[int, Answer]
) -> None:
    assert_same_answers(computed, answers_of_one_rank)
    assert set(storage_tokens(computed).values()) == {0}


def test_both_ranks_restore_the_whole_prompt_after_a_flush(
    setting: Setting, flushed: dict[int, Reply], answers_of_one_rank: dict[int, Answer]
) -> None:
    # SGLang takes the shortest prefix that a rank has, so none has less.
    assert storage_tokens(flushed) == {length: setting.family.restorable(length) for length in flushed}
    assert_same_answers(flushed, answers_of_one_rank)


def test_what_ranks_split_is_stored_once_a_rank_and_what_they_share_once(
    served: ServedModel, setting: Setting
) -> None:
    family = setting.family
    prompt = served.prompts.take(family.lengths[0])
    before = files(served)
    store(served, setting, prompt)

    pages = family.restorable(len(prompt)) // family.page_tokens
    for pool in family.namespaces:
        blocks = {block for rank in range(RANKS) for block in setting.blocks(prompt, pool, rank)}
        assert len(blocks) == len(family.owners) * (1 if pool in family.last_page else pages)
    assert files(served) - before == setting.all_blocks(prompt)


def test_what_one_rank_has_lost_is_lost_to_both_and_the_answer_is_right(
    served: ServedModel, setting: Setting
) -> None:
    for pool, rank in product(setting.family.namespaces, setting.family.owners):
        prompt = served.prompts.take(setting.family.lengths[0])
        reference = store(served, setting, prompt)
        setting.blocks(prompt, pool, rank)[0].unlink()
        reply = served.generate(prompt)
        assert (pool, rank, reply.cached) == (pool, rank, CachedTokens())
        assert_same_answers({0: reply}, {0: reference.answer})


def test_what_each_rank_restores_shows_in_the_answer(served: ServedModel, setting: Setting) -> None:
    # Without this, the others would pass if the bytes of a rank did not matter.
    for pool, rank in product(setting.family.namespaces, setting.family.owners):
        other, prompt = (served.prompts.take(setting.family.lengths[0]) for _ in range(2))
        store(served, setting, other)
        reference = store(served, setting, prompt)
        pairs = (setting.blocks(each, pool, rank) for each in (other, prompt))
        for source, block in zip(*pairs, strict=True):
            block_damage.transplant(source, block)
        reply = served.generate(prompt)
        assert reply.cached == CachedTokens(storage=setting.family.restorable(len(prompt)))
        assert reference.answer.max_abs_logprob_delta(reply.answer) > LOGPROB_TOLERANCE, (pool, rank)


@dataclass(frozen=True)
class Aftermath:
    """What the death of a rank left behind.

    Attributes:
        prompts: What was being stored; none was stored before.
        left: The blocks that were there when nothing of the server was left.
    """

    prompts: list[tuple[int, ...]]
    left: set[Path]


@pytest.fixture(scope="module")
def aftermath(served: ServedModel, setting: Setting, flushed: dict[int, Reply]) -> Aftermath:
    """Kill one rank as soon as its first block of several prompts is there, and start the server again."""
    assert flushed
    family = setting.family
    prompts = [served.prompts.take(family.burst_tokens) for _ in range(BURST)]
    expected = set().union(*map(setting.all_blocks, prompts))
    of_victim = [
        block
        for prompt in prompts
        for pool in family.namespaces
        for block in setting.blocks(prompt, pool, family.victim)
    ]
    victim = served.server.scheduler_pids()[family.victim]
    with ThreadPoolExecutor(BURST) as executor:
        replies = [executor.submit(served.generate, prompt) for prompt in prompts]
        while not any(block.exists() for block in of_victim):
            assert not any(reply.done() and reply.exception() for reply in replies)
            time.sleep(_POLL_S)
        os.kill(victim, signal.SIGKILL)
        served.server.kill()
        assert any(isinstance(reply.exception(), ServerError) for reply in replies)
    left = {block for block in expected if block.exists()}
    assert left < expected, "the rank died in the midst of storing"
    served.server.restart()
    return Aftermath(prompts, left)


def test_after_the_death_of_a_rank_nothing_is_a_hit_that_a_rank_lacks_and_every_answer_is_right(
    served: ServedModel, setting: Setting, aftermath: Aftermath
) -> None:
    for prompt in aftermath.prompts:
        reply = served.generate(prompt)
        reference = served.client.generate(prompt, output_tokens=len(reply.answer.tokens), use_cache=False)
        complete = setting.all_blocks(prompt) <= aftermath.left
        assert reply.cached == CachedTokens(storage=setting.family.restorable(len(prompt)) if complete else 0)
        assert reference.cached == CachedTokens()
        assert_same_answers({0: reply}, {0: reference.answer})


def test_what_the_death_of_a_rank_left_incomplete_is_stored_anew(
    served: ServedModel, setting: Setting, aftermath: Aftermath
) -> None:
    wait_for_blocks(set().union(*map(setting.all_blocks, aftermath.prompts)))
    served.client.flush_cache()

    for prompt in aftermath.prompts:
        reply = served.generate(prompt)
        assert reply.cached == CachedTokens(storage=setting.family.restorable(len(prompt)))


def test_a_restarted_server_restores_what_was_stored_before(
    served: ServedModel, setting: Setting, aftermath: Aftermath, answers_of_one_rank: dict[int, Answer]
) -> None:
    assert aftermath
    served.client.flush_cache()
    restarted = {length: served.generate(prompt) for length, prompt in setting.prompts.items()}

    assert storage_tokens(restarted) == {length: setting.family.restorable(length) for length in restarted}
    assert_same_answers(restarted, answers_of_one_rank)


def test_no_unfinished_file_is_left(served: ServedModel, aftermath: Aftermath) -> None:
    assert aftermath
    (root,) = served.deployment.storage_roots
    assert [file for file in root.rglob(".tmp/*") if file.is_file()] == []


def files(served: ServedModel) -> set[Path]:
    """Return every block on storage."""
    return {block for blocks in served.storage.blocks().values() for block in blocks}
