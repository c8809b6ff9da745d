# SPDX-License-Identifier: MIT
"""A real server with as many layers as DeepSeek V4 Flash, and its draft layer: the sizes of the real pools.

Too slow for every CI run: `nox -s flash43`. The model is tiny in every way that does not show in a page.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from sglang_cpu.tiny_models import WRITERS

from ucm.store.posix.block_file import FOOTER_BYTES
from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.deepseek_v4 import DRAFT_FLAGS
from ucm.testing.served_model import ServedModel, StoredPrompt
from ucm.testing.sglang_selection import Selection
from ucm.validation.results import CachedTokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucm.validation.client import Reply

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LOGPROB_TOLERANCE = 1e-5
PROMPT_TOKENS = 600
RESTORABLE_TOKENS = 512

PAGE_BYTES = {
    "sglang_v2/swa_6589440x1": 44 * 149760,
    "sglang_v2/deepseek_v4_c4_786240x1": 21 * 37440,
    "sglang_v2/deepseek_v4_c4_indexer_177408x1": 21 * 8448,
    "sglang_v2/deepseek_v4_c4_state_2752512x1": 21 * 131072,
    "sglang_v2/deepseek_v4_c4_indexer_state_688128x1": 21 * 32768,
    "sglang_v2/deepseek_v4_c128_34560x1": 20 * 1728,
}
# Windows and states are kept where the restorable prefix ends, the rest for every page of it.
PAGES = {
    "swa": 1,
    "deepseek_v4_c4": 2,
    "deepseek_v4_c4_indexer": 2,
    "deepseek_v4_c4_state": 1,
    "deepseek_v4_c4_indexer_state": 1,
    "deepseek_v4_c128": 2,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, patched_sglang: Path) -> Iterator[ServedModel]:
    """The running deployment."""
    directory = tmp_path_factory.mktemp("flash43")
    (directory / "model").mkdir()
    WRITERS["deepseek_v4_flash43_mtp"](directory / "model", 0)
    deployment = CpuDeployment(
        model=directory / "model",
        selection=Selection.PATCHED,
        sglang=patched_sglang,
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(directory / "kv",),
        extra_flags=("--max-total-tokens", "4096", "--max-running-requests", "4", *DRAFT_FLAGS),
        start_deadline_s=900.0,
    )
    with ServedModel(deployment, directory, seed=6) as model:
        yield model


@pytest.fixture(scope="module")
def stored(served: ServedModel) -> StoredPrompt:
    """A prompt that was computed and lies on storage only."""
    return served.store(served.prompts.take(PROMPT_TOKENS))


@pytest.fixture(scope="module")
def flushed(served: ServedModel, stored: StoredPrompt) -> Reply:
    """The same prompt after a flush."""
    return served.generate(stored.prompt)


@pytest.fixture(scope="module")
def restarted(served: ServedModel, stored: StoredPrompt, flushed: Reply) -> Reply:
    """The same prompt after a restart."""
    assert flushed
    served.server.restart()
    return served.generate(stored.prompt)


def assert_restored(reply: Reply, stored: StoredPrompt) -> None:
    assert reply.cached == CachedTokens(storage=RESTORABLE_TOKENS)
    assert reply.answer.tokens == stored.answer.tokens
    assert stored.answer.max_abs_logprob_delta(reply.answer) <= LOGPROB_TOLERANCE


def test_six_pools_have_the_namespaces_and_page_sizes_of_the_real_model(
    served: ServedModel, stored: StoredPrompt
) -> None:
    assert stored.blocks
    sizes = {
        namespace: Counter(block.stat().st_size - FOOTER_BYTES for block in blocks)
        for namespace, blocks in served.storage.blocks().items()
    }
    assert {namespace: list(counted) for namespace, counted in sizes.items()} == {
        namespace: [size] for namespace, size in PAGE_BYTES.items()
    }


def test_a_prompt_of_two_whole_pages_adds_what_each_pool_needs(stored: StoredPrompt) -> None:
    assert {pool: len(blocks) for pool, blocks in stored.blocks.items()} == PAGES


def test_a_flushed_prompt_comes_back_with_the_same_answer(flushed: Reply, stored: StoredPrompt) -> None:
    assert_restored(flushed, stored)


def test_a_restarted_server_gives_the_same_answer(restarted: Reply, stored: StoredPrompt) -> None:
    assert_restored(restarted, stored)
