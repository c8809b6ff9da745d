# SPDX-License-Identifier: MIT
from __future__ import annotations

import gc
import weakref
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from benchmarks.backends import FILE, OURS, Backend
from benchmarks.block_work import GET, HIT, MISS, PHASES, SET
from benchmarks.page_sets import (
    LIMIT_PHASES,
    PAGE_SETS,
    BackendPages,
    MemoryCopies,
    PageSet,
    PlainFiles,
    host_pages,
)
from ucm.testing.host_pools import DeepSeekV4Model, MhaModel

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 4
TINY = PageSet(name="tiny", model=MhaModel(), page_tokens=64, count=COUNT)
TINY_V4 = PageSet(
    name="tiny V4",
    model=DeepSeekV4Model(mtp_layers=1),
    page_tokens=256,
    count=COUNT,
    is_mla=True,
    draft_tokens=2,
)


@pytest.mark.parametrize("page_set", [TINY, TINY_V4], ids=lambda page_set: page_set.name)
@pytest.mark.parametrize("name", [OURS, FILE])
def test_a_backend_does_all_phases_on_all_pools(tmp_path: Path, page_set: PageSet, name: str) -> None:
    pools = page_set.host_pools()
    backend = Backend(name, pools, tmp_path, is_mla=page_set.is_mla)
    work = BackendPages(backend, host_pages(page_set, pools), COUNT, page_set.page_tokens)
    with closing(work):
        for round_number in range(2):
            for phase in PHASES:
                assert work.timed(phase, round_number) > 0
            work.finish(round_number)
        with pytest.raises(AssertionError):
            work.timed(HIT, 2)


def test_pages_keep_the_memory_that_they_are_in() -> None:
    pools = TINY.host_pools()
    pool = weakref.ref(pools.anchor)
    pages = host_pages(TINY, pools)
    del pools
    gc.collect()
    assert pool() is not None
    del pages
    gc.collect()
    assert pool() is None


def test_the_v4_pages_are_those_of_six_pools() -> None:
    assert len(host_pages(TINY_V4, TINY_V4.host_pools())) == 6


@pytest.mark.parametrize("page_set", PAGE_SETS[1:], ids=lambda page_set: page_set.name)
def test_pages_are_as_large_as_their_name_says(page_set: PageSet) -> None:
    count, size, unit = page_set.name.replace("x ", "").split()
    few = PageSet(name="", model=page_set.model, page_tokens=page_set.page_tokens, count=1)
    pages = host_pages(few, few.host_pools())
    assert [pool.page_bytes for pool in pages.values()] == [int(size) * {"KB": 1 << 10, "MB": 1 << 20}[unit]]
    assert page_set.count == int(count)


def test_limits_move_the_same_bytes(tmp_path: Path) -> None:
    pages = host_pages(TINY, TINY.host_pools())
    with closing(PlainFiles("files", tmp_path, pages, COUNT)) as files:
        for phase in LIMIT_PHASES:
            files.timed(phase, 0)
        stored = (tmp_path / "plain-kv").read_bytes()
        assert len(stored) == files.moved_bytes == COUNT * pages["kv"].page_bytes
        files.finish(0)
        assert (tmp_path / "plain-kv").stat().st_size == 0
    copies = MemoryCopies("copies", pages, COUNT)
    for phase in LIMIT_PHASES:
        copies.timed(phase, 0)


def test_wrong_bytes_and_short_files_are_noticed(tmp_path: Path) -> None:
    pages = host_pages(TINY, TINY.host_pools())
    with closing(PlainFiles("files", tmp_path, pages, COUNT)) as files:
        files.timed(SET, 0)
        content = bytearray((tmp_path / "plain-kv").read_bytes())
        content[-1] ^= 1
        (tmp_path / "plain-kv").write_bytes(content)
        with pytest.raises(AssertionError, match="1 of 4 pages hold wrong bytes"):
            files.timed(GET, 0)
        (tmp_path / "plain-kv").write_bytes(content[:-1])
        with pytest.raises(AssertionError, match="bytes read of kv"):
            files.timed(GET, 0)


def test_pools_that_fail_are_named(tmp_path: Path) -> None:
    pools = TINY_V4.host_pools()
    backend = Backend(OURS, pools, tmp_path, is_mla=True)
    with closing(BackendPages(backend, host_pages(TINY_V4, pools), COUNT, 256)) as work:
        work.timed(SET, 0)
        for block in tmp_path.rglob("?" * 32):
            block.unlink()
        with pytest.raises(AssertionError, match="pages not moved: 4 of deepseek_v4_c4, 4 of"):
            work.timed(GET, 0)


def test_a_page_that_should_be_absent_is_noticed(tmp_path: Path) -> None:
    pools = TINY.host_pools()
    backend = Backend(OURS, pools, tmp_path, is_mla=False)
    with closing(BackendPages(backend, host_pages(TINY, pools), COUNT, 64)) as work:
        work.timed(SET, 0)
        with pytest.raises(AssertionError, match="4 instead of 0"):
            work.check(MISS, 0, work.run(HIT, 0))
