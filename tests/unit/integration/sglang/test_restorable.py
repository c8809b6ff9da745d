# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.integration.sglang.restorable import (
    BlockGroups,
    PoolPresence,
    leading_pages,
    restorable_prefixes,
)

PRESENCE = st.lists(st.booleans(), max_size=24)
WINDOW = st.one_of(st.none(), st.integers(1, 30))


def ends_at(ends: set[int], pages: int = 3) -> PoolPresence:
    """A state pool, window of one page, that can end at `ends` only."""
    return PoolPresence([page + 1 in ends for page in range(pages)], window_pages=1)


# sglang #39147
@pytest.mark.parametrize(
    ("swa_ends", "mamba_ends", "expected"),
    [({1, 3}, {1, 2}, [1]), ({3}, {2}, []), ({1, 2, 3}, {1, 3}, [1, 3])],
)
def test_only_ends_that_every_pool_can_serve_are_restorable(
    swa_ends: set[int], mamba_ends: set[int], expected: list[int]
) -> None:
    assert restorable_prefixes(3, [ends_at(swa_ends), ends_at(mamba_ends)]) == expected


# sglang #31679
def test_a_window_longer_than_the_prefix_needs_all_the_prefix_has() -> None:
    pool = PoolPresence([True, True, False], window_pages=8)

    assert [n for n in (1, 2, 3) if pool.can_end_at(n)] == [1, 2]


def test_a_window_must_be_complete() -> None:
    pool = PoolPresence([True, False, True, True, True], window_pages=2)

    assert [n for n in range(1, 6) if pool.can_end_at(n)] == [1, 4, 5]


def test_without_sidecars_every_prefix_is_restorable() -> None:
    assert restorable_prefixes(3, []) == [1, 2, 3]


def test_no_kv_page_is_a_miss_whatever_the_sidecars_have() -> None:
    assert restorable_prefixes(0, [ends_at({1, 2, 3})]) == []


def test_presence_shorter_than_the_prefix_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter than 4 pages"):
        restorable_prefixes(4, [ends_at({1})])


def test_a_window_of_no_pages_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        PoolPresence([True], window_pages=0)


@given(kv_pages=st.integers(0, 24), sidecars=st.lists(st.tuples(PRESENCE, WINDOW), max_size=4))
def test_the_result_is_what_checking_every_page_of_every_length_gives(
    kv_pages: int, sidecars: list[tuple[list[bool], int | None]]
) -> None:
    padded = [(present + [False] * (kv_pages - len(present)), window) for present, window in sidecars]

    def can_serve(pages: int, present: list[bool], window: int | None) -> bool:
        first = 0 if window is None else max(0, pages - window)
        return all(present[first:pages])

    expected = [n for n in range(1, kv_pages + 1) if all(can_serve(n, *sidecar) for sidecar in padded)]
    presences = [PoolPresence(present, window) for present, window in padded]
    assert restorable_prefixes(kv_pages, presences) == expected


@given(present=PRESENCE, window=WINDOW)
def test_the_longest_prefix_is_the_last_that_the_pool_can_serve(
    present: list[bool], window: int | None
) -> None:
    pool = PoolPresence(present, window)

    assert pool.longest_prefix() == max(restorable_prefixes(len(present), [pool]), default=0)


@given(present=PRESENCE)
def test_leading_pages_end_before_the_first_hole(present: list[bool]) -> None:
    pages = leading_pages(present)

    assert all(present[:pages])
    assert pages == len(present) or not present[pages]


def test_a_group_is_named_by_the_last_pages_of_its_block() -> None:
    hashes = [f"h{page}" for page in range(9)]

    assert BlockGroups(block_pages=4, group_pages=2).group_keys(hashes) == ["h2", "h3", "h6", "h7"]


def test_only_leading_complete_groups_cover_pages() -> None:
    groups = BlockGroups(block_pages=4, group_pages=2)

    assert groups.covered_pages([True, True, True, False, True, True]) == 4


def test_groups_without_a_geometry_cover_nothing() -> None:
    groups = BlockGroups(block_pages=0, group_pages=0)

    assert groups.group_keys(["h0", "h1"]) == []
    assert groups.covered_pages([True, True]) == 0
