# SPDX-License-Identifier: MIT
"""EngineStore: one pool's blocks, moved by the engine that all stores share."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from ucm.store.counters import StoreCounters
from ucm.store.errors import StoreUnavailableError
from ucm.store.interface import Block, BlockKey, BlockStatus, KVStore, StoreSpec, StoreStats, check_blocks
from ucm.store.posix.engine import SharedEngine
from ucm.store.posix.known import KnownKeys
from ucm.store.posix.operations import Delete, Dump, Load, LoadInPieces, Lookup
from ucm.store.posix.pieces import pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.posix.blocks import StoredBlocks
    from ucm.store.posix.call import Call
    from ucm.store.posix.capacity.uses import UseLog
    from ucm.store.posix.config import PosixStoreConfig


class EngineStore(KVStore):
    """A store whose I/O happens on the engine's workers.

    So a hung storage costs a caller no more than the deadline, and nothing is ever
    written to the segments of a load that has returned.

    Attributes:
        config: Deadlines and threads.
        label: What messages call it.
        files: Does the work on one block.
        known: What need not be looked up again.
        uses: Where written and used blocks are noted; None if nobody wants to know.
    """

    uses: UseLog | None = None

    def __init__(self, spec: StoreSpec, config: PosixStoreConfig) -> None:
        self.spec = spec
        self.config = config
        self.label = spec.namespace or "(root)"
        self.counters = StoreCounters(spec.block_bytes)
        self.known = KnownKeys()
        self._close_lock = threading.Lock()
        self._closed = False
        self.engine = SharedEngine.acquire(config.io_threads)
        try:
            self.files = self._open()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> StoredBlocks:
        """Open the storage.

        Raises:
            StoreUnavailableError: It cannot be used; says why.
        """

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.lookup_call(keys).run(time.monotonic())

    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        return self.load_call(blocks).run(time.monotonic())

    def dump(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        return self.dump_call(blocks).run(time.monotonic())

    def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._require_open()
        return Delete(self, keys).run(time.monotonic())

    def lookup_call(self, keys: Sequence[BlockKey]) -> Call[list[bool]]:
        """Return a lookup to be run together with those of other stores."""
        self._require_open()
        return Lookup(self, keys)

    def load_call(self, blocks: Sequence[Block]) -> Call[list[BlockStatus]]:
        """Return a load to be run together with those of other stores."""
        self._require_open()
        check_blocks(self.spec, blocks, writable=True)
        pieces = pieces_of(self.spec.block_bytes, len(blocks)) if self.files.has_pieces else 1
        return LoadInPieces(self, blocks, pieces) if pieces > 1 else Load(self, blocks)

    def dump_call(self, blocks: Sequence[Block]) -> Call[list[BlockStatus]]:
        """Return a dump to be run together with those of other stores."""
        self._require_open()
        check_blocks(self.spec, blocks, writable=False)
        return Dump(self, blocks)

    def stats(self) -> StoreStats:
        return self.counters.snapshot()

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        SharedEngine.release()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"store {self.label} is closed")
