# SPDX-License-Identifier: MIT
"""One host pool of SGLang, bound to the one store that keeps its pages."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from ucm.integration.sglang.namespace import block_keys
from ucm.integration.sglang.page_access import flat_page
from ucm.integration.sglang.restorable import leading_pages
from ucm.store.interface import Block, BlockStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ucm.integration.sglang.page_access import Page, PageAccess
    from ucm.integration.sglang.rounds import Lookups, Transfers
    from ucm.integration.sglang.sglang_compat import HostPool
    from ucm.store.interface import BlockKey, KVStore, StoreStats

logger = logging.getLogger(__name__)

# A prefix that is not stored at all is found out with few lookups.
_FIRST_LOOKUP_PAGES = 8
_LOOKUP_GROWTH = 8
_DELETE_BLOCKS = 1024


class Pool(Protocol):
    """A host pool as the connector uses it; every batch method returns one entry per page, in order.

    Methods that return `Lookups` or `Transfers` do nothing by themselves; `rounds` runs those of several
    pools together.

    Attributes:
        name: SGLang's name of the pool.
        host_pool: SGLang's pool itself.
        moves_bytes: False for a pool that owns indices only.
    """

    name: str
    host_pool: HostPool
    moves_bytes: bool

    def lookup(self, page_hashes: Sequence[str]) -> Lookups[list[bool]]:
        """Tell for each page whether it is stored."""
        ...

    def leading_pages(self, page_hashes: Sequence[str]) -> Lookups[int]:
        """Return how many pages are stored before the first one that is not."""
        ...

    def load(self, page_hashes: Sequence[str], host_indices: torch.Tensor | None) -> Transfers:
        """Restore pages into the pool.

        Args:
            page_hashes: One hash per page.
            host_indices: All host indices of the pages. With any other number
                of them, every page is `FAILED`.
        """
        ...

    def dump(self, page_hashes: Sequence[str], host_indices: torch.Tensor | None) -> Transfers:
        """Store pages of the pool; arguments like `load`."""
        ...

    def load_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """Restore pages into flat tensors outside the pool, one per page."""
        ...

    def dump_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """Store pages from flat tensors outside the pool, one per page."""
        ...

    def new_flat_page(self) -> torch.Tensor:
        """Return memory for one flat page."""
        ...

    @property
    def evicts(self) -> bool:
        """Whether pages that are not used may be removed."""
        ...

    def touch(self, page_hashes: Sequence[str]) -> None:
        """Count pages as used just now, as far as they are stored."""
        ...

    def clear(self) -> None:
        """Remove every block of this pool and model, whatever rank wrote it."""
        ...

    def stats(self) -> StoreStats | None:
        """Return the store's counters, or None where nothing is stored."""
        ...

    def close(self) -> None:
        """Give up the store; later calls find nothing."""
        ...


class RegisteredPool:
    """A pool that moves bytes.

    Args:
        name: SGLang's name of the pool.
        host_pool: The pool itself.
        access: How its pages meet the store.
        key_suffix: Text that turns a page hash into the name of a block.
        store: The pool's own store; closed with the pool.
    """

    moves_bytes = True

    def __init__(
        self, *, name: str, host_pool: HostPool, access: PageAccess, key_suffix: str, store: KVStore
    ) -> None:
        self.name = name
        self.host_pool = host_pool
        self.store = store
        self._access = access
        self._key_suffix = key_suffix

    def lookup(self, page_hashes: Sequence[str]) -> Lookups[list[bool]]:
        """See `Pool`."""
        return (yield self.store, self._keys(page_hashes))

    def leading_pages(self, page_hashes: Sequence[str]) -> Lookups[int]:
        """See `Pool`."""
        asked, step = 0, _FIRST_LOOKUP_PAGES
        while asked < len(page_hashes):
            hashes = page_hashes[asked : asked + step]
            stored = leading_pages((yield self.store, self._keys(hashes)))
            asked += stored
            if stored < len(hashes):
                break
            step *= _LOOKUP_GROWTH
        return asked

    def load(self, page_hashes: Sequence[str], host_indices: torch.Tensor | None) -> Transfers:
        """See `Pool`."""
        if host_indices is None or not self._fit(page_hashes, host_indices):
            return [BlockStatus.FAILED] * len(page_hashes)
        most = self._access.batch_pages
        if most is None or len(page_hashes) <= most:
            return (yield from self._load_batch(page_hashes, host_indices))
        statuses: list[BlockStatus] = []
        width = self._access.indices_per_page
        for first in range(0, len(page_hashes), most):
            indices = host_indices[first * width : (first + most) * width]
            statuses += yield from self._load_batch(page_hashes[first : first + most], indices)
        return statuses

    def _load_batch(self, page_hashes: Sequence[str], host_indices: torch.Tensor) -> Transfers:
        if not page_hashes:
            return []
        arrivals = self._access.incoming(host_indices)
        blocks = [
            Block(key, *arrival) for key, arrival in zip(self._keys(page_hashes), arrivals, strict=True)
        ]
        statuses = yield self.store, blocks
        self._access.take_back(arrivals)
        return statuses

    def dump(self, page_hashes: Sequence[str], host_indices: torch.Tensor | None) -> Transfers:
        """See `Pool`."""
        if host_indices is None or not self._fit(page_hashes, host_indices):
            return [BlockStatus.FAILED] * len(page_hashes)
        if not page_hashes:
            return []
        return (yield self.store, self._blocks(page_hashes, self._access.outgoing(host_indices)))

    def load_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """See `Pool`."""
        return self.store.load(self._blocks(page_hashes, self._split(flat_pages)))

    def dump_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """See `Pool`."""
        contiguous = [page.contiguous() for page in flat_pages]
        return self.store.dump(self._blocks(page_hashes, self._split(contiguous)))

    def new_flat_page(self) -> torch.Tensor:
        """See `Pool`."""
        return self.host_pool.get_dummy_flat_data_page()

    @property
    def evicts(self) -> bool:
        """See `Pool`."""
        return self.store.evicts

    def touch(self, page_hashes: Sequence[str]) -> None:
        """See `Pool`."""
        self.store.touch(self._keys(page_hashes))

    def clear(self) -> None:
        """See `Pool`."""
        keys = self.store.scan()
        while batch := list(islice(keys, _DELETE_BLOCKS)):
            self.store.delete(batch)

    def stats(self) -> StoreStats:
        """See `Pool`."""
        return self.store.stats()

    def close(self) -> None:
        """See `Pool`."""
        self.store.close()

    def _keys(self, page_hashes: Sequence[str]) -> list[BlockKey]:
        return block_keys(page_hashes, self._key_suffix)

    def _blocks(self, page_hashes: Sequence[str], pages: Sequence[Page]) -> list[Block]:
        return [Block(key, page) for key, page in zip(self._keys(page_hashes), pages, strict=True)]

    def _split(self, flat_pages: Sequence[torch.Tensor]) -> list[Page]:
        return [flat_page(page, self._access.segment_bytes) for page in flat_pages]

    def _fit(self, page_hashes: Sequence[str], host_indices: torch.Tensor) -> bool:
        needed = len(page_hashes) * self._access.indices_per_page
        given = host_indices.numel()
        if given == needed:
            return True
        logger.warning(
            "pool %s: %d pages need %d host indices, got %d",
            self.name,
            len(page_hashes),
            needed,
            given,
        )
        return False


class AbsentPool:
    """What stands for a pool that nobody has registered: it restores and stores nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self, page_hashes: Sequence[str], host_indices: torch.Tensor | None) -> Transfers:
        """See `Pool`; the indices do not matter."""
        del host_indices
        yield from ()
        logger.warning("pool %s: nobody has registered it, %d pages lost", self.name, len(page_hashes))
        return [BlockStatus.FAILED] * len(page_hashes)

    dump = load


class LogicalPool:
    """A pool that owns indices but no bytes: always present, nothing to move.

    Holds only while the host pool has no buffer; if it gets one, nothing is
    stored and nothing restored, and every verdict says so.
    """

    moves_bytes = False

    def __init__(self, *, name: str, host_pool: HostPool) -> None:
        self.name = name
        self.host_pool = host_pool

    def lookup(self, page_hashes: Sequence[str]) -> Lookups[list[bool]]:
        """See `Pool`."""
        yield from ()
        return [self._is_empty()] * len(page_hashes)

    def leading_pages(self, page_hashes: Sequence[str]) -> Lookups[int]:
        """See `Pool`."""
        yield from ()
        return len(page_hashes) if self._is_empty() else 0

    def load(self, page_hashes: Sequence[str], host_indices: torch.Tensor | None) -> Transfers:
        """See `Pool`; the indices do not matter."""
        del host_indices
        yield from ()
        return self._verdicts(page_hashes)

    dump = load

    def load_flat(self, page_hashes: Sequence[str], flat_pages: Sequence[torch.Tensor]) -> list[BlockStatus]:
        """See `Pool`; the tensors are empty."""
        del flat_pages
        return self._verdicts(page_hashes)

    dump_flat = load_flat

    def new_flat_page(self) -> torch.Tensor:
        """See `Pool`."""
        return self.host_pool.get_dummy_flat_data_page()

    @property
    def evicts(self) -> bool:
        """See `Pool`."""
        return False

    def touch(self, page_hashes: Sequence[str]) -> None:
        """See `Pool`."""

    def clear(self) -> None:
        """See `Pool`."""

    def stats(self) -> None:
        """See `Pool`."""

    def close(self) -> None:
        """See `Pool`."""

    def _verdicts(self, page_hashes: Sequence[str]) -> list[BlockStatus]:
        return [BlockStatus.DONE if self._is_empty() else BlockStatus.FAILED] * len(page_hashes)

    def _is_empty(self) -> bool:
        # Sidecars without bytes may not even have the attribute.
        return getattr(self.host_pool, "kv_buffer", None) is None
