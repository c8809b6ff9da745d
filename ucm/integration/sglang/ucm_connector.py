# SPDX-License-Identifier: MIT
"""The registry of pools: one call in, one pool call out."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.sglang.namespace import ANCHOR_POOL
from ucm.integration.sglang.pool import RegisteredPool
from ucm.integration.sglang.registration import PoolOpener, require_host_pool
from ucm.integration.sglang.restorable import PoolPresence, restorable_prefixes
from ucm.store.interface import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ucm.integration.sglang.config import UnifiedCacheConfig
    from ucm.integration.sglang.namespace import ServedModel
    from ucm.integration.sglang.pool import Pool
    from ucm.integration.sglang.restorable import BlockGroups
    from ucm.store.interface import KVStore, StoreStats

logger = logging.getLogger(__name__)


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
    """

    def __init__(self, config: UnifiedCacheConfig, model: ServedModel) -> None:
        self._opener = PoolOpener(config, model)
        self._registration = threading.Lock()
        self._primary: Pool | None = None
        # Replaced as a whole, never changed, so that transfers read it without a lock.
        self._sidecars: dict[str, Pool] = {}

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
        if old is not None:
            old.close()

    def load_primary(
        self, page_hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[BlockStatus]:
        """Restore pages of the anchor; see `Pool.load`."""
        return self._anchor().load(page_hashes, host_indices)

    def dump_primary(
        self, page_hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[BlockStatus]:
        """Store pages of the anchor; see `Pool.dump`."""
        return self._anchor().dump(page_hashes, host_indices)

    def load_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """Restore pages of the anchor into flat tensors; see `Pool.load_flat`."""
        return self._anchor().load_flat(page_hashes, flat_pages)

    def dump_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """Store pages of the anchor from flat tensors; see `Pool.dump_flat`."""
        return self._anchor().dump_flat(page_hashes, flat_pages)

    def new_flat_page(self) -> torch.Tensor:
        """Return memory for one flat page of the anchor."""
        return self._anchor().new_flat_page()

    def load(
        self, pool: str, page_hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[BlockStatus]:
        """Restore pages of a sidecar; see `Pool.load`."""
        registered = self._find(pool)
        if registered is None:
            return _unregistered(pool, page_hashes)
        return registered.load(page_hashes, host_indices)

    def dump(
        self, pool: str, page_hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[BlockStatus]:
        """Store pages of a sidecar; see `Pool.dump`."""
        registered = self._find(pool)
        if registered is None:
            return _unregistered(pool, page_hashes)
        return registered.dump(page_hashes, host_indices)

    def stored_prefix(self, page_hashes: Sequence[str]) -> int:
        """Return how many leading pages of the anchor are stored; a logical anchor proves none."""
        anchor = self._anchor()
        return anchor.leading_pages(page_hashes) if anchor.moves_bytes else 0

    def query(self, page_hashes: Sequence[str], sidecars: Sequence[SidecarQuery]) -> PrefixHit:
        """Find every prefix that all pools can serve.

        Pools are asked about the pages that the anchor has, or all pages if it
        is logical; then at least one sidecar with bytes must agree.
        """
        anchor = self._anchor()
        candidates = page_hashes[: anchor.leading_pages(page_hashes)]
        pages_by_pool = {ANCHOR_POOL: len(candidates)}
        proven = anchor.moves_bytes
        limits: list[PoolPresence] = []
        # Pools that need the whole prefix first: if they rule out every length, the others need no lookup.
        for query in sorted(sidecars, key=lambda query: query.window_pages is not None):
            pool = self._find(query.pool)
            if query.groups is not None:
                pages_by_pool[query.pool] = _covered_pages(pool, query.groups, query.group_keys, page_hashes)
                continue
            hopeless = any(limit.window_pages is None and not limit.longest_prefix() for limit in limits)
            presence = _presence(None if hopeless else pool, query.window_pages, candidates)
            pages_by_pool[query.pool] = presence.longest_prefix()
            proven = proven or (pool is not None and pool.moves_bytes)
            limits.append(presence)
        return PrefixHit(restorable_prefixes(len(candidates), limits) if proven else [], pages_by_pool)

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

    def _pools(self) -> list[Pool]:
        anchor = [] if self._primary is None else [self._primary]
        return [*anchor, *self._sidecars.values()]

    def _find(self, name: str) -> Pool | None:
        return self._sidecars.get(name, self._primary if name == ANCHOR_POOL else None)

    def _anchor(self) -> Pool:
        if self._primary is None:
            raise RuntimeError("SGLang has not registered a host pool yet")
        return self._primary


def _unregistered(pool: str, page_hashes: Sequence[str]) -> list[BlockStatus]:
    logger.warning("pool %s: nobody has registered it, %d pages lost", pool, len(page_hashes))
    return [BlockStatus.FAILED] * len(page_hashes)


def _presence(pool: Pool | None, window_pages: int | None, candidates: Sequence[str]) -> PoolPresence:
    if pool is None or not candidates:
        return PoolPresence([False] * len(candidates), window_pages)
    if window_pages is None:
        stored = pool.leading_pages(candidates)
        return PoolPresence([True] * stored + [False] * (len(candidates) - stored), None)
    return PoolPresence(pool.lookup(candidates), window_pages)


def _covered_pages(
    pool: Pool | None, groups: BlockGroups, group_keys: Sequence[str], page_hashes: Sequence[str]
) -> int:
    if pool is None:
        return 0
    present = pool.lookup(group_keys or groups.group_keys(page_hashes))
    return min(groups.covered_pages(present), len(page_hashes))
