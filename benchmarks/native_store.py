# SPDX-License-Identifier: MIT
"""The native UCM store, driven in a process of its own.

Its wheel brings another top-level package `ucm`, hundreds of threads and messages on stdout, so it never
shares an interpreter with ours. The parent starts this module with the wheel's directory first on PYTHONPATH
and names one phase at a time.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.block_work import BlockWork
from benchmarks.remote import REPOSITORY, RemoteContestant, serve

if TYPE_CHECKING:
    from collections.abc import Sequence


class NativeProcess(RemoteContestant):
    """The parent's side.

    Args:
        wheel: Directory that the native wheel is installed in (`pip install --target`).
        directory: Where it stores.
        page_bytes: Size of a block.
        count: Blocks of a batch.
        io_direct: Whether it reads and writes around the page cache.
    """

    name = "native"

    def __init__(
        self, wheel: Path, directory: Path, page_bytes: int, count: int, *, io_direct: bool = False
    ) -> None:
        super().__init__(
            self.name,
            "benchmarks.native_store",
            [str(directory), str(page_bytes), str(count), str(int(io_direct))],
            os.environ
            | {
                "PYTHONPATH": os.pathsep.join([str(wheel), str(REPOSITORY)]),
                "UCM_LOG_TO_FILE": "0",
                "UCM_LOG_LEVEL": "off",
            },
        )


class NativeWork(BlockWork):
    """The other process's side: the native PosixStore behind its connector."""

    def __init__(self, directory: Path, page_bytes: int, count: int, *, io_direct: bool) -> None:
        super().__init__("native", directory, page_bytes, count)
        # Not a plain import: for type checkers `ucm` is our package.
        factory = importlib.import_module("ucm.store.factory_v1").UcmConnectorFactoryV1
        self._store: Any = factory.create_connector(
            "UcmPipelineStore",
            {
                "store_pipeline": "Posix",
                "storage_backends": [str(directory)],
                "device_id": 0,
                "tensor_size": page_bytes,
                "shard_size": page_bytes,
                "block_size": page_bytes,
                "io_direct": io_direct,
            },
        )
        self._shards = [0] * count
        self._addresses = np.array([[self.pages.address(page)] for page in range(count)], dtype=np.uint64)

    def set(self, keys: Sequence[bytes]) -> list[bool]:
        """Dump and wait, which raises if anything failed."""
        self._store.wait(self._store.dump_data(keys, self._shards, self._addresses))
        return [True] * len(keys)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Load and wait, which raises if anything failed."""
        self._store.wait(self._store.load_data(keys, self._shards, self._addresses))
        return [True] * len(keys)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Look the keys up."""
        return [bool(found) for found in self._store.lookup(keys)]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the files; the native store cannot."""
        for key in keys:
            (self._directory / key.hex()[:3] / key.hex()).unlink()


def main() -> None:
    """Serve the parent until it goes away."""
    directory, page_bytes, count, io_direct, descriptor = sys.argv[1:]
    work = NativeWork(Path(directory), int(page_bytes), int(count), io_direct=io_direct == "1")
    serve(work, int(descriptor))


if __name__ == "__main__":
    main()
