# SPDX-License-Identifier: MIT
"""Calls of several stores run together: one deadline for all, and each with its own outcome.

Stores on the shared engine are one batch. Stores of another kind come after them, one by one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from ucm.store.posix.call import run_calls
from ucm.store.posix.engine_store import EngineStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.interface import Block, BlockKey, BlockStatus, KVStore
    from ucm.store.posix.call import Call

I = TypeVar("I")  # noqa: E741 -- an item.
V = TypeVar("V")


def lookup_together(
    calls: Sequence[tuple[KVStore, Sequence[BlockKey]]], since: float | None = None
) -> list[list[bool] | Exception]:
    """Look keys up in several stores.

    Args:
        calls: A store and what it is asked, at most once per store.
        since: When their timeouts began to run, on the monotonic clock; None
            for now.

    Returns:
        For each call what the store's own method would return, or the exception it would raise.
    """
    return _together(calls, EngineStore.lookup_call, lambda store, keys: store.lookup(keys), since)


def load_together(
    calls: Sequence[tuple[KVStore, Sequence[Block]]], since: float | None = None
) -> list[list[BlockStatus] | Exception]:
    """Load blocks from several stores; like `lookup_together`."""
    return _together(calls, EngineStore.load_call, lambda store, blocks: store.load(blocks), since)


def dump_together(
    calls: Sequence[tuple[KVStore, Sequence[Block]]], since: float | None = None
) -> list[list[BlockStatus] | Exception]:
    """Dump blocks to several stores; like `lookup_together`."""
    return _together(calls, EngineStore.dump_call, lambda store, blocks: store.dump(blocks), since)


def _together(
    calls: Sequence[tuple[KVStore, Sequence[I]]],
    begin: Callable[[EngineStore, Sequence[I]], Call[V]],
    run: Callable[[KVStore, Sequence[I]], V],
    since: float | None,
) -> list[V | Exception]:
    since = time.monotonic() if since is None else since
    if len(calls) == 1:  # The usual case.
        ((store, items),) = calls
        try:
            only = begin(store, items).run(since) if isinstance(store, EngineStore) else run(store, items)
        except Exception as exc:  # As below.
            return [exc]
        return [only]
    outcomes: dict[int, V | Exception] = {}
    batch: dict[int, Call[V]] = {}
    for number, (store, items) in enumerate(calls):
        if isinstance(store, EngineStore):
            try:
                batch[number] = begin(store, items)
            except Exception as exc:  # Whatever it is, it is this call's outcome only.
                outcomes[number] = exc
    if batch:
        try:
            results = run_calls(list(batch.values()), since)
        except Exception as exc:  # The engine cannot work for any of them.
            results = [exc] * len(batch)
        outcomes.update(zip(batch, results, strict=True))
    for number, (store, items) in enumerate(calls):
        if number not in outcomes:
            try:
                outcomes[number] = run(store, items)
            except Exception as exc:  # As above.
                outcomes[number] = exc
    return [outcomes[number] for number in range(len(calls))]
