# SPDX-License-Identifier: MIT
"""MemoryStore keeps the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.store.memory import MemoryStore
from ucm.testing.store_conformance import StoreConformance

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.store import BlockKey, KVStore, StoreSpec


class TestMemoryStore(StoreConformance):
    def setup_method(self) -> None:
        self._stored: dict[BlockKey, bytes] = {}

    def open_store(self, storage: Path, spec: StoreSpec, timeout_s: float = 30.0) -> KVStore:  # noqa: ARG002
        return MemoryStore(spec, self._stored)

    def raw_read(self, storage: Path, spec: StoreSpec, key: BlockKey) -> bytes | None:  # noqa: ARG002
        return self._stored.get(key)

    def raw_write(self, storage: Path, spec: StoreSpec, key: BlockKey, stored: bytes) -> None:  # noqa: ARG002
        self._stored[key] = stored
