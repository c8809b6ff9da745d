# SPDX-License-Identifier: MIT
"""SGLang's HiCache storage contract over UCM stores, and the exception boundary.

Until a pool is registered, everything wrong is raised. From then on SGLang's I/O
threads must survive whatever happens here: an exception becomes False for each
page, 0 for a lookup.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from ucm.integration.sglang import sglang_compat
from ucm.integration.sglang.config import UnifiedCacheConfig
from ucm.integration.sglang.errors import UnsupportedPoolError
from ucm.integration.sglang.namespace import ANCHOR_POOL
from ucm.integration.sglang.restorable import BlockGroups
from ucm.integration.sglang.sglang_compat import pool_text
from ucm.integration.sglang.ucm_connector import Move, SglangUcmConnector, SidecarQuery
from ucm.store.interface import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics

    from ucm.store.interface import KVStore

    T = TypeVar("T")

logger = logging.getLogger(__name__)

# SGLang collects them at every scheduler step, so the bound matters only when it stops doing so.
_MAX_TRANSFERS = 1024

_NO_PREFIXES = (
    "a capacity is set, but SGLang does not tell which pages come before those it stores and loads: "
    "beginnings that many prompts share may be evicted before what continues them; "
    'add "hicache_storage_pass_prefix_keys": true to the extra config'
)


class UnifiedCacheStore(HiCacheStorage):  # type: ignore[misc]  # SGLang has no type information.
    """Keeps every pool of a hybrid model in UCM stores, one store per pool.

    Args:
        storage_config: What SGLang tells a backend about the model and this rank.
        mem_pool_host: The anchor pool, or its group, where SGLang passes it to the
            constructor; a mapping (`dynamic` loading) is ignored, the pool then
            comes through `register_mem_pool_host`.

    Raises:
        StoreConfigError: The extra config is wrong, or names no storage.
        UnsupportedPoolError: The pool cannot be stored.
        StoreUnavailableError: The storage cannot be used.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: object = None) -> None:
        if sglang_compat.splits_heads(storage_config):
            raise UnsupportedPoolError.because(
                ANCHOR_POOL,
                mem_pool_host,
                "would be stored in pieces for servers of several TP sizes; only whole pages can be stored: "
                "start without tp_lcm_size, with --hicache-mem-layout page_first",
            )
        config = UnifiedCacheConfig.from_extra_config(storage_config.extra_config, os.environ)
        self._connector = SglangUcmConnector(config, sglang_compat.served_model(storage_config))
        self._transfers = _Transfers() if sglang_compat.wants_metrics(storage_config) else None
        self._hinted = False
        self._told_of_prefixes = False
        if sglang_compat.as_host_pool(mem_pool_host) is not None:
            self.register_mem_pool_host(mem_pool_host)

    @property
    def store(self) -> KVStore | None:
        """The primary pool's store; None for a logical anchor."""
        return self._connector.store

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        """Bind the anchor pool and open its store.

        Raises:
            UnsupportedPoolError: The pool cannot be stored.
            StoreConfigError: The directory holds another kind of pages of this model.
            StoreUnavailableError: The storage cannot be used.
        """
        self._connector.register_primary(mem_pool_host)
        super().register_mem_pool_host(sglang_compat.as_host_pool(mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Bind a sidecar and open its store; raises like `register_mem_pool_host`."""
        self._connector.register_pool_v2(host_pool, pool_text(host_pool_name))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return every prefix that the anchor and all sidecars can serve, and each pool's own boundary."""
        del extra_info

        def query() -> PoolTransferResult:
            hit = self._connector.query(keys, [_sidecar_query(transfer) for transfer in pool_transfers or ()])
            return sglang_compat.hit_result(hit.restorable, hit.pages_by_pool)

        return self._attempt("hit query", query, sglang_compat.hit_result([], {}))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Restore pages of sidecars; one verdict per key of each transfer."""
        verdicts = self._move("load", self._connector.load, transfers)
        self._touch_prefix(extra_info)
        return verdicts

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of sidecars; one verdict per key of each transfer."""
        verdicts = self._move("dump", self._connector.dump, transfers)
        self._touch_prefix(extra_info)
        return verdicts

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Restore pages of the anchor in place; one verdict per key."""
        start = time.perf_counter()
        verdicts = self._move_anchor("load", self._connector.load_primary, keys, host_indices)
        if self._transfers is not None and self.store is not None:
            self._transfers.loads.append(_rate(verdicts, self.store, start))
        self._touch_prefix(extra_info)
        return verdicts

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the anchor from where they are; one verdict per key."""
        start = time.perf_counter()
        verdicts = self._move_anchor("dump", self._connector.dump_primary, keys, host_indices)
        if self._transfers is not None and self.store is not None:
            self._transfers.dumps.append(_rate(verdicts, self.store, start))
        self._touch_prefix(extra_info)
        return verdicts

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Restore pages of the anchor into flat tensors, which are returned; None for a miss."""
        del target_sizes
        self._hint_zero_copy()

        def load() -> list[torch.Tensor | None]:
            pages = target_locations or [self._connector.new_flat_page() for _ in keys]
            verdicts = self._move_anchor("load", self._connector.load_flat, keys, pages)
            return [page if done else None for page, done in zip(pages, verdicts, strict=True)]

        return self._attempt("load", load, [None] * len(keys))

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store pages of the anchor from flat tensors; True if all of them are stored."""
        del target_locations, target_sizes
        self._hint_zero_copy()
        return all(self._move_anchor("dump", self._connector.dump_flat, keys, values or ()))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Restore one page of the anchor into a flat tensor; None for a miss."""
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets, target_sizes)[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store one page of the anchor from a flat tensor."""
        return self.batch_set([key], None if value is None else [value], target_location, target_sizes)

    def exists(self, key: str) -> bool:
        """Tell whether a page of the anchor is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages of the anchor are stored; a logical anchor proves none."""
        del extra_info
        return self._attempt("lookup", partial(self._connector.stored_prefix, keys), 0)

    def clear(self) -> bool:
        """Remove this model's blocks in every pool; False if that failed."""

        def clear() -> bool:
            self._connector.clear()
            return True

        return self._attempt("clear", clear, False)

    def get_stats(self) -> StorageMetrics | None:
        """Return the v1 transfers since the last call; None if SGLang wants no metrics."""
        if self._transfers is None:
            return None
        return sglang_compat.storage_metrics(_drain(self._transfers.loads), _drain(self._transfers.dumps))

    def close(self) -> None:
        """Give up every store within seconds; calling it again does nothing."""
        self._attempt("detach", self._connector.close, None)

    def _move(
        self,
        action: str,
        move: Callable[[Sequence[Move]], list[list[BlockStatus] | Exception]],
        transfers: Sequence[PoolTransfer],
    ) -> dict[str, list[bool]]:
        moves = [Move(pool_text(each.name), each.keys or [], each.host_indices) for each in transfers]
        try:
            outcomes = move(moves)
        except Exception as exc:  # As in `_attempt`.
            outcomes = [exc] * len(moves)
        return {
            transfer.name: _verdicts(action, each.pool, each.page_hashes, outcome)
            for transfer, each, outcome in zip(transfers, moves, outcomes, strict=True)
        }

    def _move_anchor(
        self,
        action: str,
        move: Callable[[Sequence[str], T], list[BlockStatus]],
        keys: Sequence[str],
        pages: T,
    ) -> list[bool]:
        outcome: list[BlockStatus] | Exception
        try:
            outcome = move(keys, pages)
        except Exception as exc:  # As in `_attempt`.
            outcome = exc
        return _verdicts(action, ANCHOR_POOL, keys, outcome)

    def _attempt(self, action: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as exc:  # The boundary: nothing may end SGLang's I/O threads.
            logger.warning("%s: %s: %s", action, type(exc).__name__, exc)
            return otherwise

    def _touch_prefix(self, extra_info: HiCacheStorageExtraInfo | None) -> None:
        """Count what comes before a call's pages as used, if SGLang tells it."""
        if self._connector.evicts:
            self._attempt("touch", partial(self._touch, extra_info), None)

    def _touch(self, extra_info: HiCacheStorageExtraInfo | None) -> None:
        prefix = getattr(extra_info, "prefix_keys", None)
        if prefix:
            self._connector.touch_prefix(prefix)
        elif prefix is None and not self._told_of_prefixes:
            self._told_of_prefixes = True
            logger.warning(_NO_PREFIXES)

    def _hint_zero_copy(self) -> None:
        if not self._hinted:
            self._hinted = True
            logger.info('pages are copied on their way; "interface_v1": 1 in the extra config avoids it')


class _Transfers:
    """v1 transfers that SGLang has not asked about yet: pages moved, and GB/s."""

    def __init__(self) -> None:
        self.loads: deque[tuple[int, float]] = deque(maxlen=_MAX_TRANSFERS)
        self.dumps: deque[tuple[int, float]] = deque(maxlen=_MAX_TRANSFERS)


def _sidecar_query(transfer: PoolTransfer) -> SidecarQuery:
    pool = pool_text(transfer.name)
    if transfer.hit_policy == sglang_compat.TRAILING_PAGES:
        # The keys are placeholders; only their number counts.
        return SidecarQuery(pool, window_pages=max(1, len(transfer.keys or ())))
    if transfer.hit_policy == sglang_compat.BLOCK_GROUPS:
        groups = BlockGroups(transfer.block_pages, transfer.group_pages)
        return SidecarQuery(pool, groups=groups, group_keys=transfer.keys or ())
    return SidecarQuery(pool)


def _verdicts(
    action: str, pool: str, keys: Sequence[str], outcome: list[BlockStatus] | Exception
) -> list[bool]:
    """Return one verdict per key, whatever happened."""
    if isinstance(outcome, Exception):
        first = f", first {keys[0]}" if keys else ""
        what = f"{action} {pool}, {len(keys)} pages{first}"
        logger.warning("%s: %s: %s", what, type(outcome).__name__, outcome)
        return [False] * len(keys)
    return [status is BlockStatus.DONE for status in outcome]


def _rate(verdicts: Sequence[bool], store: KVStore, start: float) -> tuple[int, float]:
    pages = sum(verdicts)
    return pages, pages * store.spec.block_bytes / 1e9 / (time.perf_counter() - start)


def _drain(transfers: deque[tuple[int, float]]) -> list[tuple[int, float]]:
    drained = []
    while transfers:
        drained.append(transfers.popleft())
    return drained
