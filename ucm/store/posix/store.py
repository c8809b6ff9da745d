# SPDX-License-Identifier: MIT
"""PosixStore: one pool's namespace of block files."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, TypeVar

from ucm.store.errors import StoreConfigError, StoreUnavailableError
from ucm.store.posix.block_file import file_bytes
from ucm.store.posix.blocks import BlockFiles
from ucm.store.posix.capacity.service import SharedCapacity
from ucm.store.posix.engine import Urgency
from ucm.store.posix.engine_store import EngineStore
from ucm.store.posix.file_io import is_block_of, prepare_directory
from ucm.store.posix.layout import TEMP_DIRECTORY, BlockLayout, is_shard_name, key_of
from ucm.store.posix.writer import new_writer_name, remove_orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.store.interface import BlockKey, StoreSpec
    from ucm.store.posix.config import PosixStoreConfig
    from ucm.store.posix.file_io import FileSystem, Scratch
    from ucm.store.posix.lease import HostLease

logger = logging.getLogger(__name__)

# The kernel takes 1024 buffers in one call; the footer is one of them.
_MAX_SEGMENTS = 1000
_SHARDS_PER_SCAN_BATCH = 64

_T = TypeVar("_T")


class PosixStore(EngineStore):
    """One namespace of block files below the storage roots.

    After a dump has missed its deadline the kernel may still be reading the segments,
    into a file that is never published.

    Attributes:
        layout: Where the files are.

    Raises:
        StoreConfigError: The spec cannot be kept in files.
        StoreUnavailableError: A storage root cannot be used; says which and why.
    """

    files: BlockFiles

    def __init__(self, spec: StoreSpec, config: PosixStoreConfig) -> None:
        if len(spec.segment_bytes) > _MAX_SEGMENTS:
            raise StoreConfigError(
                f"{len(spec.segment_bytes)} segments in a block, at most {_MAX_SEGMENTS} work"
            )
        self._accept_unverified = config.accept_unverified
        self._durability = config.durability
        self.layout = BlockLayout(config.storage_backends, spec.namespace)
        super().__init__(spec, config)
        if config.capacity_bytes is not None:
            self.evicts = True
            self.uses = SharedCapacity.join(
                self.layout, spec.namespace, file_bytes(spec), config.capacity_bytes, self.counters.evicted
            )

    def touch(self, keys: Sequence[BlockKey]) -> None:
        if self.uses:
            self.uses.used(keys)

    def close(self) -> None:
        if self.uses:
            SharedCapacity.leave(self.uses)
        super().close()

    def scan(self) -> Iterator[BlockKey]:
        self._require_open()
        return self._scan()

    def _open(self) -> BlockFiles:
        return BlockFiles(
            self.spec,
            self.layout,
            self._prepare_directories(),
            accept_unverified=self._accept_unverified,
            durability=self._durability,
        )

    def _scan(self) -> Iterator[BlockKey]:
        directories = self.layout.directories
        shards = self._list_all(directories, _list_shards)
        for start in range(0, len(shards), _SHARDS_PER_SCAN_BATCH):
            yield from self._list_all(shards[start : start + _SHARDS_PER_SCAN_BATCH], self._list_blocks)

    def _list_all(self, directories: Sequence[str], list_one: Callable[[str], list[_T]]) -> list[_T]:
        found: list[_T] = []
        listings = self.engine.run(
            lambda index, _scratch, _lease: list_one(directories[index]),
            len(directories),
            urgency=Urgency.WRITE,
            timeout_s=self.config.dump_timeout_s,
        )
        for directory, listing in zip(directories, listings, strict=True):
            if listing is None:
                raise StoreUnavailableError(
                    f"listing {directory}: no answer within {self.config.dump_timeout_s:g} s"
                )
            found += listing
        return found

    def _list_blocks(self, shard: str) -> list[BlockKey]:
        keys = []
        for name in _names_in(shard):
            key = key_of(name)
            path = f"{shard}/{name}"
            if key is not None and self.layout.path(key) == path and is_block_of(path, self.spec, key):
                keys.append(key)
        return keys

    def _prepare_directories(self) -> list[FileSystem]:
        directories = self.layout.directories

        def prepare(index: int, _scratch: Scratch, _lease: HostLease) -> FileSystem:
            try:
                probe = f"{TEMP_DIRECTORY}/probe.{new_writer_name()}"
                found = prepare_directory(directories[index], probe, self.config.io_mode)
                orphans = remove_orphans(f"{directories[index]}/{TEMP_DIRECTORY}")
            except OSError as exc:
                raise StoreUnavailableError(
                    f"cannot keep blocks in {directories[index]}: {exc.strerror}; "
                    "name a directory in 'storage_backends' that this user can create and write"
                ) from exc
            if orphans:
                logger.info(
                    "removed %d unfinished files of dead writers from %s", orphans, directories[index]
                )
            return found

        timeout_s = self.config.dump_timeout_s
        results = self.engine.run(prepare, len(directories), urgency=Urgency.WRITE, timeout_s=timeout_s)
        for directory, result in zip(directories, results, strict=True):
            if result is None:
                raise StoreUnavailableError(f"cannot open {directory}: no answer within {timeout_s:g} s")
        return [result for result in results if result is not None]


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise StoreUnavailableError(f"cannot list {directory}: {exc.strerror}") from exc


def _list_shards(directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in _names_in(directory) if is_shard_name(name)]
