# SPDX-License-Identifier: MIT
"""NativeConnector: one block in or out of a store of UCM's package, through memory of our own.

The native store fails a whole batch if one of its blocks fails, and in some
releases looks up only the keys before the first that is missing. A call about
one block means the same in all of them, so every call here is about one.

It writes to the addresses it was given for as long as it likes. So it gets
memory that belongs to the calling worker, who is stuck for exactly that long.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucm.store.native.package import connector_factory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.interface import BlockKey
    from ucm.store.native.config import NativeStoreConfig

logger = logging.getLogger(__name__)

# A native wait must not end before its transfer does, or the memory would be used for something else.
_NATIVE_TIMEOUT_MS = 7 * 24 * 3600 * 1000
_CLOSE_TIMEOUT_S = 2.0

# Native stores that hang in storage. Their destructors would wait for it, and hold the GIL meanwhile.
_abandoned: list[object] = []


class NativeCallError(Exception):
    """A call of the native store failed."""


class _Staging(threading.local):
    """A worker's memory for one stored block, of the largest size there was."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def room(self, size: int) -> tuple[memoryview, int]:
        """Return page-aligned memory and its address."""
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(-1, size)
        return memoryview(self._memory)[:size], ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


_staging = _Staging()


class NativeConnector:
    """A store of UCM's package.

    Args:
        size: Bytes of everything it stores.
        config: Which store, and its options.
        directories: Where it keeps files, if it does.

    Raises:
        StoreConfigError: UCM's package cannot be imported.
        NativeCallError: The store cannot be opened.
    """

    def __init__(self, size: int, config: NativeStoreConfig, directories: list[str]) -> None:
        self._size = size
        self._idle = threading.Condition()
        self._busy = 0
        factory = connector_factory(config.package)
        options = dict(config.options) | {
            "storage_backends": directories,
            "tensor_size": size,
            "shard_size": size,
            "block_size": size,
            "timeout_ms": _NATIVE_TIMEOUT_MS,
        }
        with _foreign_errors():
            self._store: Any = factory.create_connector(config.connector_name, options, config.module_path)

    def room(self) -> memoryview:
        """Return the calling worker's memory for one block; valid until it asks for that of another store."""
        memory, _ = _staging.room(self._size)
        return memory

    def holds(self, key: BlockKey) -> bool:
        """Ask the store for one block.

        Raises:
            NativeCallError: It cannot tell.
        """
        with self._calling() as store:
            return bool(store.lookup([key])[0])

    def load(self, key: BlockKey) -> None:
        """Fill `room` with a stored block; waits for storage.

        Raises:
            NativeCallError: There is none, or it cannot be read.
        """
        _, address = _staging.room(self._size)
        with self._calling() as store:
            store.wait(store.load_data([key], [0], [[address]]))

    def dump(self, key: BlockKey) -> None:
        """Store what is in `room`; waits for storage.

        Raises:
            NativeCallError: It was not stored.
        """
        _, address = _staging.room(self._size)
        with self._calling() as store:
            store.wait(store.dump_data([key], [0], [[address]]))

    def close(self) -> None:
        """Close the native store, or give it up if it does not come back from storage."""
        with self._idle:
            store, self._store = self._store, None
            if store is not None and not self._idle.wait_for(
                lambda: not self._busy, timeout=_CLOSE_TIMEOUT_S
            ):
                _abandoned.append(store)
                logger.warning("the native store hangs in storage; its threads stay until it comes back")

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """Keep the native store open meanwhile, and turn what it raises into one error."""
        with self._idle:
            store = self._store
            self._busy += 1
        try:
            with _foreign_errors():
                if store is None:
                    raise NativeCallError("the store is closed")
                yield store
        finally:
            del store
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()


@contextmanager
def _foreign_errors() -> Iterator[None]:
    try:
        yield
    except NativeCallError:
        raise
    except Exception as exc:  # Whatever another project's code raises, it costs one block.
        raise NativeCallError(f"{type(exc).__name__}: {exc}") from exc
