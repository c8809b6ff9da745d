# SPDX-License-Identifier: MIT
"""PosixStore keeps the contract, on the file system of the tests and on one in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path, hanging_call
from ucm.testing.store_conformance import DurableStoreConformance

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ucm.store import BlockKey, KVStore, StoreSpec


class TestPosixStore(DurableStoreConformance):
    stores: ClassVar[list[KVStore]] = []

    @pytest.fixture(autouse=True)
    def close_stores(self) -> Iterator[None]:
        """Close what a test has left open, because it was skipped half-way for instance."""
        yield
        while self.stores:
            self.stores.pop().close()

    def open_store(self, storage: Path, spec: StoreSpec, timeout_s: float = 30.0) -> KVStore:
        config = PosixStoreConfig(
            storage_backends=(str(storage),),
            load_timeout_s=timeout_s,
            dump_timeout_s=timeout_s,
            lookup_timeout_s=timeout_s,
        )
        self.stores.append(PosixStore(spec, config))
        return self.stores[-1]

    def raw_read(self, storage: Path, spec: StoreSpec, key: BlockKey) -> bytes | None:
        path = block_path(storage, spec, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, storage: Path, spec: StoreSpec, key: BlockKey, stored: bytes) -> None:
        path = block_path(storage, spec, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)

    def hang(self, key: BlockKey, operation: str) -> AbstractContextManager[threading.Event]:
        return hanging_call({"lookup": "stat", "load": "preadv", "dump": "pwritev"}[operation], key.hex())

    def unfinished_files(self, storage: Path) -> list[str]:
        return [path.name for path in storage.glob("**/.tmp/*")]


class TestPosixStoreInMemory(TestPosixStore):
    @pytest.fixture
    def storage(self, memory: Path) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=memory) as directory:
            yield Path(directory)
