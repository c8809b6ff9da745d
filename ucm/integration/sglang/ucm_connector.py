# SPDX-License-Identifier: MIT
"""The registry of pools: one call in, the same call of every pool it concerns out."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ucm.integration.sglang import rounds
from ucm.integration.sglang.namespace import ANCHOR_POOL
from ucm.integration.sglang.pool import AbsentPool, RegisteredPool
from ucm.integration.sglang.registration import PoolOpener, require_host_pool
from ucm.integration.sglang.restorable import PoolPresence, restorable_prefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ucm.integration.sglang.config import UnifiedCacheConfig
    from ucm.integration.sglang.namespace import ServedModel
    from ucm.integration.sglang.pool import Pool
    from ucm.integration.sglang.restorable import BlockGroups
    from ucm.integration.sglang.rounds import Lookups
    from ucm.store.interface import BlockStatus, KVStore, StoreStats

logger = logging.getLogger(__name__)


class Move(NamedTuple):
    """Pages of one sidecar to be moved; see `Pool.load`."""

    pool: str
    page_hashes: Sequence[str]
    host_indices: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SidecarQuery:
    """What one sidecar must have for a prefix to be usable.

    Args:
        pool: Name of the sidecar.
        window_pages: How many pages before the end must exist; None: all of them.
        groups: The pool answers for its own groups of keys and limits nothing.
        group_keys: Keys of these groups, if the caller names them.
    """

    pool: str
    window_pages: int | None = None
    groups: BlockGroups | None = None
    group_keys: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The answer to a hit query.

    Args:
        restorable: Every prefix length, in pages, that all pools can serve, ascending.
        pages_by_pool: The longest prefix each pool could serve by itself.
    """

    restorable: list[int]
    pages_by_pool: dict[str, int]


class SglangUcmConnector:
    """Finds the pool for each call; every pool has its own store.

    Pools may be registered from one thread while others transfer. A pool that
    nobody registered holds nothing: lookups find 0 pages, transfers fail.

    Args:
        config: The user's settings.
        model: The model and the part of it this process holds.

    Attributes:
        evicts: Whether pages that are not used may be removed.
    """

    def __init__(self, config: UnifiedCacheConfig, model: ServedModel) -> None:
        self.evicts = False
        self._opener = PoolOpener(config, model)
        self._registration = threading.Lock()
        self._primary: Pool | None = None
        # Replaced as a whole, never changed, so that transfers read it without a lock.
        self._sidecars: dict[str, Pool] = {}
        # As far as SGLang has asked: how many pages of these are needed, where others need the whole prefix.
        self._windows: dict[str, int] = {}
        self._touched_prefixes: set[str] = set()
        self._touched_minute = 0

    @property
    def store(self) -> KVStore | None:
        """The primary pool's store; None for a logical anchor."""
        return self._primary.store if isinstance(self._primary, RegisteredPool) else None

    def register_primary(self, host_pool: object) -> None:
        """Bind the anchor, which may come inside its group; the same one twice changes nothing.

        Raises:
            UnsupportedPoolError: The pool cannot be stored.
            StoreConfigError: The directory holds another kind of pages of this model.
            StoreUnavailableError: The storage cannot be used.
        """
        anchor = require_host_pool(ANCHOR_POOL, host_pool)
        with self._registration:
            old = self._primary
            if old is not None and old.host_pool is anchor:
                return
            self._primary = self._opener.anchor(anchor)
            self.evicts |= self._primary.evicts
        if old is not None:
            old.close()

    def register_pool_v2(self, host_pool: object, pool_name: str) -> None:
        """Bind a sidecar; a name that is registered already is replaced and its store closed.

        The anchor arrives here as well. It is skipped if the primary store has
        its bytes, or if it has none.

        Raises:
            UnsupportedPoolError: The pool cannot be stored.
            StoreConfigError: The directory holds another kind of pages of this model.
            StoreUnavailableError: The storage cannot be used.
        """
        if pool_name == ANCHOR_POOL and self.store is not None:
            return
        pool = require_host_pool(pool_name, host_pool)
        with self._registration:
            registered = self._opener.sidecar(pool, pool_name)
            if pool_name == ANCHOR_POOL and not registered.moves_bytes:
                return
            old = self._sidecars.get(pool_name)
            self._sidecars = {**self._sidecars, pool_name: registered}
            self.evicts |= registered.evicts
        if old is not None:
            old.close()

    def load_primary(
        self, page_hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[BlockStatus]:
        """Restore pages of the anchor; see `Pool.load`."""
        [outcome] = rounds.load([self._anchor().load(page_hashes, host_indices)])
        return rounds.result_of(outcome)

    def dump_primary(
        self, page_hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[BlockStatus]:
        """Store pages of the anchor; see `Pool.dump`."""
        [outcome] = rounds.dump([self._anchor().dump(page_hashes, host_indices)])
        return rounds.result_of(outcome)

    def load_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """Restore pages of the anchor into flat tensors; see `Pool.load_flat`."""
        return self._anchor().load_flat(page_hashes, flat_pages)

    def dump_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """Store pages of the anchor from flat tensors; see `Pool.dump_flat`."""
        return self._anchor().dump_flat(page_hashes, flat_pages)

    def new_flat_page(self) -> torch.Tensor:
        """Return memory for one flat page of the anchor."""
        return self._anchor().new_flat_page()

    def load(self, moves: Sequence[Move]) -> list[list[BlockStatus] | Exception]:
        """Restore pages of sidecars together.

        Returns:
            For each move the verdicts of `Pool.load`, or the exception that it alone ended with.
        """
        return rounds.load([self._pool_of(move).load(move.page_hashes, move.host_indices) for move in moves])

    def dump(self, moves: Sequence[Move]) -> list[list[BlockStatus] | Exception]:
        """Store pages of sidecars together; like `load`."""
        return rounds.dump([self._pool_of(move).dump(move.page_hashes, move.host_indices) for move in moves])

    def stored_prefix(self, page_hashes: Sequence[str]) -> int:
        """Return how many leading pages of the anchor are stored; a logical anchor proves none."""
        anchor = self._anchor()
        return _leading_pages(anchor, page_hashes, time.monotonic()) if anchor.moves_bytes else 0

    def query(self, page_hashes: Sequence[str], sidecars: Sequence[SidecarQuery]) -> PrefixHit:
        """Find every prefix that all pools can serve.

        Pools are asked about the pages that the anchor has, or all pages if it
        is logical; then at least one sidecar with bytes must agree.
        """
        since = time.monotonic()
        anchor = self._anchor()
        candidates = page_hashes[: _leading_pages(anchor, page_hashes, since)]
        # Pools that need the whole prefix first: if they rule out every length, the others need no lookup.
        whole, trailing, groups = _by_policy(sidecars)
        counts = rounds.look_up(
            [
                *(self._leading_pages(query, candidates) for query in whole),
                *(self._covered_pages(query, page_hashes) for query in groups),
            ],
            since,
        )
        asked = [*whole, *groups]
        pages = {query.pool: rounds.result_of(count) for query, count in zip(asked, counts, strict=True)}
        limits = [_leading(pages[query.pool], len(candidates)) for query in whole]
        hopeless = not candidates or not all(pages[query.pool] for query in whole)
        found = rounds.look_up([self._stored(query, candidates, hopeless) for query in trailing], since)
        for query, present in zip(trailing, found, strict=True):
            self._windows[query.pool] = query.window_pages or 1
            limits.append(PoolPresence(rounds.result_of(present), query.window_pages))
            pages[query.pool] = limits[-1].longest_prefix()
        limiting = (self._find(query.pool) for query in (*whole, *trailing))
        proven = anchor.moves_bytes or any(pool is not None and pool.moves_bytes for pool in limiting)
        restorable = restorable_prefixes(len(candidates), limits) if proven else []
        return PrefixHit(restorable, {ANCHOR_POOL: len(candidates), **pages})

    def touch_prefix(self, page_hashes: Sequence[str]) -> None:
        """Count a prefix as used just now, where pages that are not used get evicted.

        SGLang keeps the beginning of a prompt that many share in its own memory, and never loads it
        from here. But pages that continue it are worth nothing without it.
        """
        pools = [pool for pool in self._pools() if pool.evicts]
        if not pools or not page_hashes or self._was_touched(page_hashes[-1]):
            return
        for pool in pools:
            window = self._windows.get(pool.name, len(page_hashes))
            pool.touch(page_hashes[-window:])

    def clear(self) -> None:
        """Remove every block of this model in every registered pool, whatever rank wrote it."""
        for pool in self._pools():
            pool.clear()

    def stats(self) -> dict[str, StoreStats]:
        """Return the counters of each pool that stores something."""
        counters = ((pool.name, pool.stats()) for pool in self._pools())
        return {name: stats for name, stats in counters if stats is not None}

    def close(self) -> None:
        """Give up every store within seconds; calling it again does nothing."""
        with ExitStack() as closing:
            for pool in self._pools():
                closing.callback(pool.close)

    def _was_touched(self, last_hash: str) -> bool:
        """Tell whether a prefix, known by its last page, was touched in this minute."""
        minute = int(time.time() // 60)
        if minute != self._touched_minute:
            self._touched_minute, self._touched_prefixes = minute, set()
        was_touched = last_hash in self._touched_prefixes
        self._touched_prefixes.add(last_hash)
        return was_touched

    def _pools(self) -> list[Pool]:
        anchor = [] if self._primary is None else [self._primary]
        return [*anchor, *self._sidecars.values()]

    def _find(self, name: str) -> Pool | None:
        return self._sidecars.get(name, self._primary if name == ANCHOR_POOL else None)

    def _anchor(self) -> Pool:
        if self._primary is None:
            raise RuntimeError("SGLang has not registered a host pool yet")
        return self._primary

    def _pool_of(self, move: Move) -> Pool | AbsentPool:
        return self._find(move.pool) or AbsentPool(move.pool)

    def _leading_pages(self, query: SidecarQuery, candidates: Sequence[str]) -> Lookups[int]:
        pool = self._find(query.pool)
        return 0 if pool is None or not candidates else (yield from pool.leading_pages(candidates))

    def _covered_pages(self, query: SidecarQuery, page_hashes: Sequence[str]) -> Lookups[int]:
        pool, groups = self._find(query.pool), query.groups
        if pool is None or groups is None:
            return 0
        present = yield from pool.lookup(query.group_keys or groups.group_keys(page_hashes))
        return min(groups.covered_pages(present), len(page_hashes))

    def _stored(self, query: SidecarQuery, candidates: Sequence[str], hopeless: bool) -> Lookups[list[bool]]:
        pool = self._find(query.pool)
        if pool is None or hopeless:
            return [False] * len(candidates)
        return (yield from pool.lookup(candidates))


def _by_policy(
    sidecars: Sequence[SidecarQuery],
) -> tuple[list[SidecarQuery], list[SidecarQuery], list[SidecarQuery]]:
    """Split queries into those for the whole prefix, for its end, and for groups of keys."""
    limiting = [query for query in sidecars if query.groups is None]
    whole = [query for query in limiting if query.window_pages is None]
    trailing = [query for query in limiting if query.window_pages is not None]
    return whole, trailing, [query for query in sidecars if query.groups is not None]


def _leading_pages(pool: Pool, page_hashes: Sequence[str], since: float) -> int:
    [outcome] = rounds.look_up([pool.leading_pages(page_hashes)], since)
    return rounds.result_of(outcome)


def _leading(stored: int, pages: int) -> PoolPresence:
    return PoolPresence([True] * stored + [False] * (pages - stored), None)
