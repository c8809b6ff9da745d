# SPDX-License-Identifier: MIT
"""From a host pool of SGLang to a pool with a store, or a refusal that says what to change."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from ucm.integration.sglang.errors import UnsupportedPoolError
from ucm.integration.sglang.namespace import ANCHOR_POOL, CacheNamespace, ServedModel
from ucm.integration.sglang.page_access import StagedAccess, ZeroCopyAccess, probe_parts
from ucm.integration.sglang.pool import LogicalPool, Pool, RegisteredPool
from ucm.integration.sglang.sglang_compat import (
    STATE_POOL,
    as_host_pool,
    byte_order,
    has_no_bytes,
    holds_dcp_shard,
    holds_heads,
    is_slot_sharded,
    keeps_index_to_itself,
    logical_dtype,
    pool_ownership,
    takes_layout,
)
from ucm.store.factory import claim_identity, open_store
from ucm.store.interface import StoreSpec

if TYPE_CHECKING:
    from ucm.integration.sglang.config import UnifiedCacheConfig
    from ucm.integration.sglang.namespace import PoolOwnership
    from ucm.integration.sglang.sglang_compat import HostPool

logger = logging.getLogger(__name__)

PAGE_FIRST_LAYOUTS = ("page_first", "page_first_direct")

_POOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class PoolOpener:
    """Opens one store per pool, all of one model on one storage.

    Both methods raise `UnsupportedPoolError` for a pool that cannot be stored,
    `StoreConfigError` for a directory that holds another kind of pages of this
    model, and `StoreUnavailableError` for storage that cannot be used.

    Args:
        config: The user's settings.
        model: The model and the part of it this process holds.
    """

    def __init__(self, config: UnifiedCacheConfig, model: ServedModel) -> None:
        self._config = config
        self._model = model

    def anchor(self, host_pool: HostPool) -> Pool:
        """Open the pool that SGLang moves through its v1 interface."""
        if has_no_bytes(host_pool):
            # Its layout means nothing, and older releases always call it layer_first.
            return _logical(ANCHOR_POOL, host_pool)
        _require_page_first(ANCHOR_POOL, host_pool)
        if keeps_index_to_itself(host_pool):
            raise UnsupportedPoolError.because(
                ANCHOR_POOL,
                host_pool,
                "holds a sparse-attention index that this SGLang stores nowhere, so a restored prefix would "
                "give wrong text: run `ucm-sglang patch apply`, or start without --hicache-storage-backend",
            )
        parts = probe_parts(ANCHOR_POOL, host_pool)
        if holds_heads(host_pool) and len(parts) != 2:
            raise UnsupportedPoolError.because(
                ANCHOR_POOL,
                host_pool,
                f"has pages of {len(parts)} parts; attention heads need K and V, or a restored page would "
                "lack one: start without --hicache-storage-backend",
            )
        return self._open(ANCHOR_POOL, host_pool, primary=True)

    def sidecar(self, host_pool: HostPool, name: str) -> Pool:
        """Open a pool that SGLang moves through its v2 interface."""
        if not _POOL_NAME.fullmatch(name):
            raise UnsupportedPoolError.because(
                name,
                host_pool,
                "cannot name a directory; expected letters, digits, '_', '.' and '-'",
            )
        if name == ANCHOR_POOL and has_no_bytes(host_pool):
            return _logical(name, host_pool)
        _require_page_first(name, host_pool)
        if not probe_parts(name, host_pool):
            return _logical(name, host_pool)
        return self._open(name, host_pool, primary=False)

    def _open(self, name: str, host_pool: HostPool, *, primary: bool) -> RegisteredPool:
        if is_slot_sharded(host_pool):
            raise UnsupportedPoolError.because(
                name,
                host_pool,
                "spreads its slots over ranks; only whole pages can be stored: "
                "start without --enable-kv-cache-sharding",
            )
        # SGLang 0.5.23 refuses it for all names but two; earlier releases would let it through.
        if self._model.shard.dcp_size > 1 or holds_dcp_shard(host_pool):
            raise UnsupportedPoolError.because(
                name,
                host_pool,
                "holds only the tokens of one rank (decode context parallelism); only whole pages can be "
                "stored: start without --dcp-size, or with --hicache-storage-backend file",
            )
        staged = name == STATE_POOL
        access = (StagedAccess if staged else ZeroCopyAccess)(name, host_pool)
        namespace = CacheNamespace(
            model=self._model,
            pool=name,
            primary=primary,
            ownership=pool_ownership(name, host_pool, self._model),
            dtype=logical_dtype(host_pool),
            layout=byte_order(host_pool),
            page_tokens=access.indices_per_page,
            segment_bytes=access.segment_bytes,
            component_bytes=access.component_bytes,
        )
        claim_identity(self._config.store, namespace.record_name, namespace.identity)
        spec = StoreSpec(namespace.directory, namespace.segment_bytes, namespace.identity_digest)
        store = open_store(spec, self._config.store)
        logger.info(
            "pool %s: %d x %d bytes per page of %s (%s), %s, %s, below %r",
            name,
            len(namespace.component_bytes),
            namespace.component_bytes[0],
            namespace.dtype,
            namespace.layout,
            "staged" if staged else "zero copy",
            _told(namespace.ownership),
            namespace.directory,
        )
        return RegisteredPool(
            name=name, host_pool=host_pool, access=access, key_suffix=namespace.key_suffix, store=store
        )


def require_host_pool(name: str, candidate: object) -> HostPool:
    """Return the pool in what SGLang hands over, or refuse it."""
    host_pool = as_host_pool(candidate)
    if host_pool is None:
        raise UnsupportedPoolError.because(
            name,
            candidate,
            "gives no page pointers; such a pool cannot be stored: start without --hicache-storage-backend",
        )
    return host_pool


def _told(ownership: PoolOwnership) -> str:
    if not ownership.replicated:
        return "this rank's own"
    return f"the same on all TP ranks, written by {'this one' if ownership.writes else 'another'}"


def _logical(name: str, host_pool: HostPool) -> LogicalPool:
    logger.info("pool %s: logical, owns no bytes and needs no store", name)
    return LogicalPool(name=name, host_pool=host_pool)


def _require_page_first(name: str, host_pool: HostPool) -> None:
    """Refuse a pool whose pages are scattered over the layers."""
    if host_pool.layout in PAGE_FIRST_LAYOUTS:
        return
    if not takes_layout(host_pool):
        raise UnsupportedPoolError.because(
            name,
            host_pool,
            "has this layout whatever --hicache-mem-layout says, as this SGLang knows no other for it: use a "
            "newer SGLang (DeepSeek V4 needs 0.5.13), or start without --hicache-storage-backend",
        )
    raise UnsupportedPoolError.because(
        name,
        host_pool,
        f"is not page first; expected layout {' or '.join(map(repr, PAGE_FIRST_LAYOUTS))}: start with "
        "--hicache-mem-layout page_first (and --hicache-io-backend kernel) "
        "or page_first_direct (and --hicache-io-backend direct)",
    )
