# SPDX-License-Identifier: MIT
"""FaultInjectingStore: any store, failing on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ucm.store import Block, BlockKey, BlockStatus, KVStore, StoreStats

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

Operation = Literal["lookup", "load", "dump", "delete", "scan", "stats", "close"]


class FaultInjectingStore(KVStore):
    """Passes calls on to `store`, unless told to misbehave.

    For tests of what stands above a store; it breaks the contract of `KVStore` on
    purpose, as a store of someone else's might.
    """

    def __init__(self, store: KVStore) -> None:
        self.spec = store.spec
        self._store = store
        self._errors: dict[Operation, Exception] = {}
        self._holds: dict[Operation, threading.Event] = {}
        self._verdicts: dict[Operation, dict[BlockKey, BlockStatus]] = {}

    def fail(self, operation: Operation, error: Exception) -> None:
        """Let every call of `operation` raise `error`."""
        self._errors[operation] = error

    def hold(self, operation: Operation, until: threading.Event) -> None:
        """Let every call of `operation` wait for the event before it begins."""
        self._holds[operation] = until

    def answer(self, operation: Operation, key: BlockKey, status: BlockStatus) -> None:
        """Let `operation` give this verdict on `key` without touching its block.

        A lookup or delete says True for `DONE`, False for any other.
        """
        self._verdicts.setdefault(operation, {})[key] = status

    def heal(self) -> None:
        """Behave again."""
        self._errors.clear()
        self._holds.clear()
        self._verdicts.clear()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        verdicts = self._begin("lookup")
        found = iter(self._store.lookup([key for key in keys if key not in verdicts]))
        return [verdicts[key] is BlockStatus.DONE if key in verdicts else next(found) for key in keys]

    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        verdicts = self._begin("load")
        statuses = iter(self._store.load([block for block in blocks if block.key not in verdicts]))
        return [verdicts[block.key] if block.key in verdicts else next(statuses) for block in blocks]

    def dump(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        verdicts = self._begin("dump")
        statuses = iter(self._store.dump([block for block in blocks if block.key not in verdicts]))
        return [verdicts[block.key] if block.key in verdicts else next(statuses) for block in blocks]

    def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        verdicts = self._begin("delete")
        removed = iter(self._store.delete([key for key in keys if key not in verdicts]))
        return [verdicts[key] is BlockStatus.DONE if key in verdicts else next(removed) for key in keys]

    def scan(self) -> Iterator[BlockKey]:
        self._begin("scan")
        return self._store.scan()

    def stats(self) -> StoreStats:
        self._begin("stats")
        return self._store.stats()

    def close(self) -> None:
        self._begin("close")
        self._store.close()

    def _begin(self, operation: Operation) -> dict[BlockKey, BlockStatus]:
        if operation in self._holds:
            self._holds[operation].wait()
        if operation in self._errors:
            raise self._errors[operation]
        return self._verdicts.get(operation, {})
