# SPDX-License-Identifier: MIT
"""The native PosixStore behind our interface keeps the contract; each test opens one, which takes seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from ucm.store.factory import StoreConfig, open_store
from ucm.store.native.store import NativeFileStore
from ucm.testing import native_ucm
from ucm.testing.posix_faults import block_path, hanging_call
from ucm.testing.store_conformance import (
    DONE,
    FAILED,
    HURRY_S,
    SPEC,
    DurableStoreConformance,
    GuardedBlock,
    assert_loads,
    key_of,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ucm.store import BlockKey, KVStore, StoreSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("native_package")]


class TestNativeFileStore(DurableStoreConformance):
    def open_store(self, storage: Path, spec: StoreSpec, timeout_s: float = 60.0) -> KVStore:
        options = {
            "engine": "native",
            "native_package": str(native_ucm.directory()),
            "storage_backends": str(storage),
            "load_timeout_s": timeout_s,
            "lookup_timeout_s": timeout_s,
            "dump_timeout_s": 60.0,
        }
        store = open_store(spec, StoreConfig.from_mapping(options))
        assert isinstance(store, NativeFileStore)
        # It holds for opening too, which takes the native store seconds at times.
        store.config = dataclasses.replace(store.config, dump_timeout_s=timeout_s)
        return store

    def raw_read(self, storage: Path, spec: StoreSpec, key: BlockKey) -> bytes | None:
        path = block_path(storage, spec, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, storage: Path, spec: StoreSpec, key: BlockKey, stored: bytes) -> None:
        path = block_path(storage, spec, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)

    def hang(self, key: BlockKey, operation: str) -> AbstractContextManager[threading.Event]:
        if operation == "lookup":
            return hanging_call("stat", key.hex())
        return _hanging_wait(key, f"{operation}_data")

    def unfinished_files(self, storage: Path) -> list[str]:
        return [
            path.name for path in (*storage.glob("**/.tmp/*"), *storage.glob("**/*.tmp")) if path.is_file()
        ]

    def test_a_dump_that_missed_its_deadline_is_never_published(self, storage: Path) -> None:
        # The native store publishes by itself; but what it publishes is a copy made before the deadline.
        hurried = self.open_store(storage, SPEC, timeout_s=HURRY_S)
        memory = GuardedBlock(SPEC, key_of(1), payload_of(1))
        with self.hang(key_of(1), "dump"):
            assert hurried.dump([memory.block, *outgoing([2])]) == [FAILED, DONE]
            memory.block.segments[0][:] = bytes(SPEC.segment_bytes[0])  # The page has a new owner.
        hurried.close()
        assert self.unfinished_files(storage) == []
        store = self.open_store(storage, SPEC)
        assert_loads(store, [1, 2])
        store.close()


@contextlib.contextmanager
def _hanging_wait(key: BlockKey, begin: str) -> Iterator[threading.Event]:
    """Let the native `wait` for transfers of `key` hang until the context ends."""
    # Not a plain import: for type checkers `ucm` is our package.
    UcmPipelineStore = importlib.import_module("ucm.store.pipeline.connector").UcmPipelineStore  # noqa: N806
    hanging, go_on = threading.Event(), threading.Event()
    hung: set[Any] = set()
    original_begin: Callable[..., Any] = getattr(UcmPipelineStore, begin)
    original_wait = UcmPipelineStore.wait

    def begin_transfer(self: Any, keys: list[bytes], *rest: Any) -> Any:  # noqa: ANN401 -- UCM's.
        task = original_begin(self, keys, *rest)
        if key in keys:
            hung.add((id(self), task.task_id))
        return task

    def wait(self: Any, task: Any) -> None:  # noqa: ANN401 -- UCM's.
        if (id(self), task.task_id) in hung:
            hanging.set()
            go_on.wait()
        original_wait(self, task)

    with (
        mock.patch.object(UcmPipelineStore, begin, begin_transfer),
        mock.patch.object(UcmPipelineStore, "wait", wait),
    ):
        try:
            yield hanging
        finally:
            go_on.set()
