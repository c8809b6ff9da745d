# SPDX-License-Identifier: MIT
"""A real server with a tiny DeepSeek V4: a logical anchor and six pools that must agree.

Two deployments cover both layouts, and speculative decoding with a draft layer on and off. Each server is
started once and restarted once; every prompt is new, so that the tests do not depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from sglang_cpu.tiny_models import WRITERS

from ucm.testing import block_damage
from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.deepseek_v4 import DRAFT_FLAGS
from ucm.testing.restartable_server import thread_names
from ucm.testing.served_model import ServedModel, StoredPrompt
from ucm.testing.sglang_selection import Selection
from ucm.validation.results import Answer, CachedTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE_TOKENS = 256
LOGPROB_TOLERANCE = 1e-5
MAX_IO_THREADS = 16

# One token of every prompt is computed, so a prompt of two whole pages can use one only.
RESTORABLE_BY_LENGTH = {511: 256, 512: 256, 513: 512, 768: 512, 1500: 1280}
# EAGLE keys the cache by pairs of tokens, so that a prompt has one key less.
RESTORABLE_WITH_DRAFT = RESTORABLE_BY_LENGTH | {513: 256}
DAMAGED_PROMPT_TOKENS = 600
DAMAGED_PROMPT_RESTORABLE = 512

# Page bytes of five layers: all have a sliding window, two compress by 4, one by 128.
PAGE_BYTES = {
    "swa": 5 * 149760,
    "deepseek_v4_c4": 2 * 37440,
    "deepseek_v4_c4_indexer": 2 * 8448,
    "deepseek_v4_c4_state": 2 * 65536,
    "deepseek_v4_c4_indexer_state": 2 * 16384,
    "deepseek_v4_c128": 1728,
}
# A draft layer has a window of its own, and drafting doubles the compressors' rings.
PAGE_BYTES_WITH_DRAFT = PAGE_BYTES | {
    "swa": 6 * 149760,
    "deepseek_v4_c4_state": 2 * 131072,
    "deepseek_v4_c4_indexer_state": 2 * 32768,
}

DAMAGES: list[Callable[[Path], None]] = [block_damage.flip_payload, block_damage.remove]


@dataclass(frozen=True)
class Computed:
    """What a prompt gave when it was computed, and from storage after a flush."""

    stored: StoredPrompt
    flushed: CachedTokens
    flushed_answer: Answer


@pytest.fixture(scope="module", params=["plain", "draft"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, released_sglang: Path | None
) -> Iterator[ServedModel]:
    """The running deployment that a test is about."""
    directory = tmp_path_factory.mktemp(request.param)
    family = {"plain": "deepseek_v4", "draft": "deepseek_v4_mtp"}[request.param]
    (directory / "model").mkdir()
    WRITERS[family](directory / "model", 0)
    plain = CpuDeployment(
        model=directory / "model",
        selection=Selection.PLUGIN,
        sglang=released_sglang,
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(directory / "kv",),
        extra_flags=("--max-total-tokens", "8192"),
    )
    draft = replace(plain, layout="page_first_direct", extra_flags=(*plain.extra_flags, *DRAFT_FLAGS))
    with ServedModel({"plain": plain, "draft": draft}[request.param], directory, seed=5) as model:
        yield model


@pytest.fixture(scope="module")
def computed(served: ServedModel) -> dict[int, Computed]:
    """One prompt of each length: computed, stored, and restored after a flush."""
    prompts = {}
    for length in RESTORABLE_BY_LENGTH:
        stored = served.store(served.prompts.take(length))
        reply = served.generate(stored.prompt)
        prompts[length] = Computed(stored, reply.cached, reply.answer)
    return prompts


@pytest.fixture(scope="module")
def restarted(served: ServedModel, computed: dict[int, Computed]) -> ServedModel:
    """The same deployment after a restart: only what is on disk is left."""
    assert computed
    served.server.restart()
    return served


def is_drafting(served: ServedModel) -> bool:
    return "--speculative-algorithm" in served.deployment.extra_flags


@pytest.fixture
def restorable(served: ServedModel) -> dict[int, int]:
    """How many tokens of a stored prompt storage gives back, by the prompt's length."""
    return RESTORABLE_WITH_DRAFT if is_drafting(served) else RESTORABLE_BY_LENGTH


def assert_same_answer(answer: Answer, reference: Answer) -> None:
    assert answer.tokens == reference.tokens
    assert reference.max_abs_logprob_delta(answer) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("length", RESTORABLE_BY_LENGTH)
def test_a_flushed_prompt_comes_back_from_storage(
    length: int, computed: dict[int, Computed], restorable: dict[int, int]
) -> None:
    prompt = computed[length]
    assert prompt.flushed == CachedTokens(storage=restorable[length])
    assert_same_answer(prompt.flushed_answer, prompt.stored.answer)


def test_a_prompt_in_l1_is_not_read_from_storage(served: ServedModel, computed: dict[int, Computed]) -> None:
    stored = computed[1500].stored
    served.generate(stored.prompt)
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens(device=RESTORABLE_BY_LENGTH[1500])
    assert_same_answer(reply.answer, stored.answer)


def test_six_pools_lie_below_their_own_namespaces_and_the_anchor_nowhere(
    served: ServedModel, computed: dict[int, Computed]
) -> None:
    assert computed
    expected = PAGE_BYTES_WITH_DRAFT if is_drafting(served) else PAGE_BYTES
    namespaces = {f"sglang_v2/{pool}_{size}x1": size for pool, size in expected.items()}
    assert {pool.namespace: pool.page_bytes for pool in served.storage.pools()} == namespaces


def test_six_pools_share_at_most_16_threads(served: ServedModel, computed: dict[int, Computed]) -> None:
    assert computed
    (scheduler,) = served.server.scheduler_pids()
    ours = [name for name in thread_names(scheduler) if name.startswith("ucm-io")]
    assert 1 <= len(ours) <= MAX_IO_THREADS


@pytest.mark.parametrize("served", ["plain"], indirect=True)
@pytest.mark.parametrize("pool", PAGE_BYTES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_one_damaged_pool_makes_a_miss_and_the_answer_is_right(
    damage: Callable[[Path], None], pool: str, served: ServedModel
) -> None:
    stored = served.store(served.prompts.take(DAMAGED_PROMPT_TOKENS))
    for block in stored.blocks[pool]:
        damage(block)
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens()
    assert_same_answer(reply.answer, stored.answer)


@pytest.mark.parametrize("served", ["plain"], indirect=True)
@pytest.mark.parametrize("pool", PAGE_BYTES)
def test_what_a_pool_holds_shows_in_the_answer(pool: str, served: ServedModel) -> None:
    # Without this, the test above would pass for a pool whose bytes do not matter.
    other = served.store(served.prompts.take(DAMAGED_PROMPT_TOKENS))
    stored = served.store(served.prompts.take(DAMAGED_PROMPT_TOKENS))
    for block, source in zip(stored.blocks[pool], other.blocks[pool], strict=True):
        block_damage.transplant(source, block)
    reply = served.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=DAMAGED_PROMPT_RESTORABLE)
    assert stored.answer.max_abs_logprob_delta(reply.answer) > LOGPROB_TOLERANCE


@pytest.mark.parametrize("length", RESTORABLE_BY_LENGTH)
def test_a_restarted_server_restores_from_storage(
    length: int, restarted: ServedModel, computed: dict[int, Computed], restorable: dict[int, int]
) -> None:
    stored = computed[length].stored
    restarted.client.flush_cache()
    reply = restarted.generate(stored.prompt)
    assert reply.cached == CachedTokens(storage=restorable[length])
    assert_same_answer(reply.answer, stored.answer)


def test_prompts_at_once_are_all_restored(
    restarted: ServedModel, computed: dict[int, Computed], restorable: dict[int, int]
) -> None:
    lengths = (513, 768, 1500)
    restarted.client.flush_cache()
    replies = restarted.client.generate_at_once(
        [computed[length].stored.prompt for length in lengths], output_tokens=8
    )
    assert [reply.cached.storage for reply in replies] == [restorable[length] for length in lengths]
    for length, reply in zip(lengths, replies, strict=True):
        assert_same_answer(reply.answer, computed[length].stored.answer)


def test_the_installed_release_restores_what_the_named_one_stored(
    restarted: ServedModel,
    computed: dict[int, Computed],
    restorable: dict[int, int],
    released_sglang: Path | None,
    tmp_path: Path,
) -> None:
    if released_sglang is None:
        pytest.skip("--sglang names no other release")
    with ServedModel(replace(restarted.deployment, sglang=None), tmp_path, seed=6) as installed:
        for length, prompt in computed.items():
            reply = installed.generate(prompt.stored.prompt)
            assert reply.cached == CachedTokens(storage=restorable[length])
            assert_same_answer(reply.answer, prompt.stored.answer)


def test_no_server_log_tells_of_an_exception(restarted: ServedModel) -> None:
    for log in restarted.server.logs:
        # While it shuts down, SGLang reports its own processes' end as an exception.
        serving, _, _ = log.read_text().partition("INFO:     Shutting down")
        assert [line for line in serving.splitlines() if "Traceback" in line or "ERROR" in line] == []
