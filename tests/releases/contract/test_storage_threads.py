# SPDX-License-Identifier: MIT
"""SGLang's storage threads when a backend raises: one request is lost, nothing else.

Our backend never raises; here one does on purpose. Up to 0.5.21 a patch each keeps the threads alive, from
0.5.22 SGLang does so itself. Its two controllers share some of the code of these threads, which part depends
on the release; so both are tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from ucm.testing.pool_memory import page_indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.testing.release_pools import ReleaseController

PAGE_TOKENS = 64
TOKENS = list(range(2 * PAGE_TOKENS))
SOON_S = 60.0


@pytest.fixture(params=["plain", "hybrid"])
def attached(request: pytest.FixtureRequest, storage: dict[str, Any]) -> ReleaseController:
    """Each controller, with our backend."""
    controller: ReleaseController = request.getfixturevalue(f"{request.param}_controller")
    controller.attach("unifiedcache", storage)
    return controller


@pytest.fixture
def attached_hybrid(hybrid_controller: ReleaseController, storage: dict[str, Any]) -> ReleaseController:
    """The controller that moves linear-attention states too, with our backend."""
    hybrid_controller.attach("unifiedcache", storage)
    return hybrid_controller


def raise_once(controller: ReleaseController, monkeypatch: pytest.MonkeyPatch, method: str) -> list[int]:
    """Let one method of the backend raise at its next call; return a list that counts its calls."""
    calls: list[int] = []
    original: Callable[..., Any] = getattr(controller.backend, method)

    def raise_or_call(*arguments: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(5, "I/O error")
        return original(*arguments, **more)

    monkeypatch.setattr(controller.backend, method, raise_or_call)
    return calls


def states(controller: ReleaseController, page: int, keys: list[str]) -> list[PoolTransfer]:
    """Ask for, or move, the linear-attention state at the end of a prompt."""
    indices = page_indices(controller.pools.by_name["mamba"], [page])
    return [
        PoolTransfer(PoolName.MAMBA, host_indices=indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    ]


def store(controller: ReleaseController, sidecars: bool = False) -> int:
    """Back up a prompt of two pages; return how many of its tokens are stored."""
    hashes = controller.page_hashes(TOKENS)
    transfers = states(controller, 0, hashes[-1:]) if sidecars else None
    controller.back_up(hashes, torch.arange(len(TOKENS)), transfers)
    return controller.backed_up_tokens(SOON_S)


def test_a_backup_that_raises_is_acknowledged(
    attached: ReleaseController, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_once(attached, monkeypatch, "batch_set_v1")

    assert store(attached) == 0
    assert store(attached) == len(TOKENS)


def test_a_backup_of_sidecars_that_raises_is_acknowledged(
    attached_hybrid: ReleaseController, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_once(attached_hybrid, monkeypatch, "batch_set_v2")

    assert store(attached_hybrid, sidecars=True) == 0
    assert store(attached_hybrid, sidecars=True) == len(TOKENS)


def test_a_lookup_that_raises_is_a_miss(attached: ReleaseController, monkeypatch: pytest.MonkeyPatch) -> None:
    store(attached)
    raise_once(attached, monkeypatch, "batch_exists")

    assert attached.prefetched_tokens(TOKENS, SOON_S) == 0
    assert attached.prefetched_tokens(TOKENS, SOON_S) == len(TOKENS)


def test_a_load_that_raises_ends_one_request_only(
    attached: ReleaseController, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(attached)
    raise_once(attached, monkeypatch, "batch_get_v1")

    assert attached.prefetched_tokens(TOKENS, SOON_S) == 0
    assert attached.prefetched_tokens(TOKENS, SOON_S) == len(TOKENS)


def test_a_load_of_sidecars_that_raises_ends_one_request_only(
    attached_hybrid: ReleaseController, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(attached_hybrid, sidecars=True)
    calls = raise_once(attached_hybrid, monkeypatch, "batch_get_v2")

    attached_hybrid.prefetched_tokens(TOKENS, SOON_S, states(attached_hybrid, 1, ["?"]))
    acknowledgements = attached_hybrid.acknowledgements
    tokens = attached_hybrid.prefetched_tokens(TOKENS, SOON_S, states(attached_hybrid, 1, ["?"]))

    assert len(calls) == 2
    assert tokens == len(TOKENS)
    # Each is agreed upon with the other ranks, which may have had no exception.
    assert acknowledgements == attached_hybrid.acknowledgements
