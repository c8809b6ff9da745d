# SPDX-License-Identifier: MIT
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ucm.integration.sglang import page_access
from ucm.integration.sglang.page_access import StagedAccess, ZeroCopyAccess, flat_page
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MhaModel, MlaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_page, read_pages

if TYPE_CHECKING:
    from ucm.testing.host_pools import Model


def flat(page: list[memoryview]) -> bytes:
    return b"".join(bytes(segment) for segment in page)


@pytest.mark.parametrize(
    ("model", "pool", "page_tokens", "segments"),
    [
        (MhaModel(), "kv", 64, 2),
        (MlaModel(), "kv", 64, 1),
        (DsaModel(), "indexer", 64, 1),
        (DeepSeekV4Model(), "swa", 256, 1),
        (DeepSeekV4Model(), "deepseek_v4_c4_state", 256, 1),
    ],
)
def test_segments_are_the_host_pages_themselves(
    model: Model, pool: str, page_tokens: int, segments: int
) -> None:
    host_pool = host_pools(model, page_tokens=page_tokens, pages=4)[pool]
    before = fill_random(host_pool)
    access = ZeroCopyAccess(pool, host_pool)

    pages = access.outgoing(page_indices(host_pool, [2, 0]))

    assert [len(page) for page in pages] == [segments] * 2
    assert [flat(page) for page in pages] == [before[2], before[0]]
    pages[0][0][:4] = b"\x01\x02\x03\x04"
    assert read_page(host_pool, 2)[:4] == b"\x01\x02\x03\x04"


def test_states_leave_from_where_they_are() -> None:
    host_pool = host_pools(MambaModel())["mamba"]
    before = fill_random(host_pool)
    access = StagedAccess("mamba", host_pool)

    (page,) = access.outgoing(torch.tensor([3]))

    assert flat(page) == before[3]
    assert len(page) == 3
    assert access.component_bytes == (len(before[0]),)


def test_a_state_reaches_the_pool_when_it_is_published_and_others_do_not() -> None:
    host_pool = host_pools(MambaModel())["mamba"]
    before = fill_random(host_pool)
    access = StagedAccess("mamba", host_pool)
    indices = torch.tensor([1, 2, 3])

    arrivals = access.incoming(indices)
    for place, arrival in enumerate(arrivals):
        for segment in arrival.segments:
            segment[:] = bytes([place + 1]) * len(segment)
    assert read_pages(host_pool) == before
    assert arrivals[0].publish is not None
    arrivals[0].publish()
    access.take_back(arrivals)

    assert read_page(host_pool, 1) == b"\x01" * len(before[0])
    assert [read_page(host_pool, 0), *read_pages(host_pool)[2:]] == [before[0], *before[2:]]


def test_staging_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host_pool = host_pools(MambaModel())["mamba"]
    access = StagedAccess("mamba", host_pool)
    new_vector = host_pool.get_dummy_flat_data_page
    allocated = []

    def count() -> torch.Tensor:
        allocated.append(1)
        return new_vector()

    monkeypatch.setattr(host_pool, "get_dummy_flat_data_page", count)
    indices = torch.tensor([1, 2, 3])
    for _ in range(5):
        access.take_back(access.incoming(indices))

    assert len(allocated) == 2  # One is there from registration.


def test_no_more_is_staged_than_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    host_pool = host_pools(MambaModel())["mamba"]
    page_bytes = len(read_page(host_pool, 0))
    monkeypatch.setattr(page_access, "_STAGING_BYTES", 3 * page_bytes)

    assert StagedAccess("mamba", host_pool).batch_pages == 3
    monkeypatch.setattr(page_access, "_STAGING_BYTES", page_bytes // 2)
    assert StagedAccess("mamba", host_pool).batch_pages == 1


@pytest.mark.parametrize("pool", ["kv", "mamba"])
@pytest.mark.parametrize("start", [-1, -64, 10_000])
def test_an_index_outside_the_pool_is_an_error(pool: str, start: int) -> None:
    host_pool = host_pools(MambaModel())[pool]
    access = (StagedAccess if pool == "mamba" else ZeroCopyAccess)(pool, host_pool)
    indices = torch.arange(host_pool.page_size) + start

    with pytest.raises(ValueError, match=rf"the pool has \[0, {host_pool.size}\)"):
        access.outgoing(indices)
    with pytest.raises(ValueError, match=rf"the pool has \[0, {host_pool.size}\)"):
        access.incoming(indices)


def test_a_flat_page_is_cut_without_a_copy() -> None:
    page = torch.arange(6, dtype=torch.int16)

    segments = flat_page(page, (4, 8))

    assert [len(segment) for segment in segments] == [4, 8]
    segments[1][:2] = b"\xff\xff"
    assert page.tolist() == [0, 1, -1, 3, 4, 5]


@pytest.mark.parametrize("page", [torch.zeros(5, dtype=torch.int16), torch.zeros(2, 6, dtype=torch.int16).T])
def test_a_flat_page_of_another_form_is_an_error(page: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"not contiguous|parts of \[10\] bytes"):
        flat_page(page, (4, 8))
