# SPDX-License-Identifier: MIT
"""PosixStore: one pool's namespace of block files, on the engine that all stores share."""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ucm.store.counters import StoreCounters
from ucm.store.errors import BlockCorruptError, StoreConfigError, StoreUnavailableError
from ucm.store.interface import Block, BlockKey, BlockStatus, KVStore, StoreSpec, StoreStats, check_blocks
from ucm.store.posix.block_file import file_bytes
from ucm.store.posix.engine import SharedEngine, Urgency
from ucm.store.posix.file_io import is_block_of, is_stored, prepare_directory, read_block, write_block
from ucm.store.posix.layout import TEMP_DIRECTORY, BlockLayout, is_shard_name, key_of
from ucm.store.posix.writer import new_writer_name, remove_orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.store.posix.config import PosixStoreConfig
    from ucm.store.posix.engine import Work
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.lease import HostLease

logger = logging.getLogger(__name__)

# The kernel takes 1024 buffers in one call; the footer is one of them.
_MAX_SEGMENTS = 1000
_SHARDS_PER_SCAN_BATCH = 64
# So much data is worth one more worker from the start.
_BYTES_PER_WORKER = 4 * 1024 * 1024


_T = TypeVar("_T")


class _Verdict(NamedTuple):
    status: BlockStatus
    reason: str = ""


class _Prepared(NamedTuple):
    in_place_flags: int | None


_DONE = _Verdict(BlockStatus.DONE)
_STORED_ALREADY = _Verdict(BlockStatus.DONE, "stored already")
_MISSING = _Verdict(BlockStatus.MISSING)


class PosixStore(KVStore):
    """One namespace of block files below the storage roots.

    All its I/O happens on the engine's workers, so a hung file system costs a
    caller no more than the deadline. After a dump has missed its deadline the
    kernel may still be reading the segments, into a file that is never published;
    nothing is ever written to the segments of a load that has returned.

    Raises:
        StoreConfigError: The spec cannot be kept in files.
        StoreUnavailableError: A storage root cannot be used; says which and why.
    """

    def __init__(self, spec: StoreSpec, config: PosixStoreConfig) -> None:
        if len(spec.segment_bytes) > _MAX_SEGMENTS:
            raise StoreConfigError(
                f"{len(spec.segment_bytes)} segments in a block, at most {_MAX_SEGMENTS} work"
            )
        self.spec = spec
        self._config = config
        self._label = spec.namespace or "(root)"
        self._layout = BlockLayout(config.storage_backends, spec.namespace)
        self._file_bytes = file_bytes(spec)
        self._counters = StoreCounters(spec.block_bytes)
        self._close_lock = threading.Lock()
        self._closed = False
        self._engine = SharedEngine.acquire(config.io_threads)
        try:
            self._in_place_flags = self._prepare_directories()
        except BaseException:
            self.close()
            raise

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        verdicts = self._run(
            "lookup",
            lambda index, _scratch, _lease: self._look(keys[index]),
            keys,
            self._config.lookup_timeout_s,
        )
        found = [verdict.status is BlockStatus.DONE for verdict in verdicts]
        self._counters.looked_up(found)
        return found

    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        check_blocks(self.spec, blocks, writable=True)
        verdicts = self._run(
            "load",
            lambda index, scratch, lease: self._load_one(blocks[index], scratch, lease),
            [block.key for block in blocks],
            self._config.load_timeout_s,
            moved_bytes=len(blocks) * self.spec.block_bytes,
        )
        statuses = [verdict.status for verdict in verdicts]
        self._counters.loaded(statuses)
        return statuses

    def dump(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        check_blocks(self.spec, blocks, writable=False)
        verdicts = self._run(
            "dump",
            lambda index, _scratch, lease: self._dump_one(blocks[index], lease),
            [block.key for block in blocks],
            self._config.dump_timeout_s,
            Urgency.WRITE,
            moved_bytes=len(blocks) * self.spec.block_bytes,
        )
        statuses = [verdict.status for verdict in verdicts]
        self._counters.dumped(verdicts.count(_DONE), statuses.count(BlockStatus.FAILED))
        return statuses

    def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        verdicts = self._run(
            "delete",
            lambda index, _scratch, _lease: self._delete_one(keys[index]),
            keys,
            self._config.dump_timeout_s,
            Urgency.WRITE,
        )
        return [verdict.status is BlockStatus.DONE for verdict in verdicts]

    def scan(self) -> Iterator[BlockKey]:
        self._require_open()
        return self._scan()

    def stats(self) -> StoreStats:
        return self._counters.snapshot()

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        SharedEngine.release()

    def _look(self, key: BlockKey) -> _Verdict:
        try:
            return _DONE if is_stored(self._layout.path(key), self._file_bytes) else _MISSING
        except OSError as exc:
            return _failed(exc)

    def _load_one(self, block: Block, scratch: Scratch, lease: HostLease) -> _Verdict:
        flags = self._in_place_flags[self._layout.root_index(block.key)]
        path = self._layout.path(block.key)
        try:
            read_block(path, self.spec, block, lease, scratch, flags)
        except (FileNotFoundError, NotADirectoryError):
            return _MISSING
        except BlockCorruptError as exc:
            return _Verdict(BlockStatus.CORRUPT, str(exc))
        except OSError as exc:
            return _failed(exc)
        return _DONE

    def _dump_one(self, block: Block, lease: HostLease) -> _Verdict:
        path = self._layout.path(block.key)
        try:
            if is_stored(path, self._file_bytes):
                return _STORED_ALREADY
            temp = self._layout.temp_path(block.key, new_writer_name())
            write_block(path, temp, self.spec, block, lease)
        except OSError as exc:
            return _failed(exc)
        return _DONE

    def _delete_one(self, key: BlockKey) -> _Verdict:
        try:
            os.unlink(self._layout.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return _MISSING
        except OSError as exc:
            return _failed(exc)
        return _DONE

    def _scan(self) -> Iterator[BlockKey]:
        directories = self._layout.directories
        shards = self._list_all(directories, _list_shards)
        for start in range(0, len(shards), _SHARDS_PER_SCAN_BATCH):
            yield from self._list_all(shards[start : start + _SHARDS_PER_SCAN_BATCH], self._list_blocks)

    def _list_all(self, directories: Sequence[str], list_one: Callable[[str], list[_T]]) -> list[_T]:
        found: list[_T] = []
        listings = self._engine.run(
            lambda index, _scratch, _lease: list_one(directories[index]),
            len(directories),
            urgency=Urgency.WRITE,
            timeout_s=self._config.dump_timeout_s,
        )
        for directory, listing in zip(directories, listings, strict=True):
            if listing is None:
                raise StoreUnavailableError(
                    f"listing {directory}: no answer within {self._config.dump_timeout_s:g} s"
                )
            found += listing
        return found

    def _list_blocks(self, shard: str) -> list[BlockKey]:
        keys = []
        for name in _names_in(shard):
            key = key_of(name)
            path = f"{shard}/{name}"
            if key is not None and self._layout.path(key) == path and is_block_of(path, self.spec, key):
                keys.append(key)
        return keys

    def _run(
        self,
        operation: str,
        work: Work[_Verdict],
        keys: Sequence[BlockKey],
        timeout_s: float,
        urgency: Urgency = Urgency.READ,
        moved_bytes: int = 0,
    ) -> list[_Verdict]:
        self._require_open()
        workers = 1 + moved_bytes // _BYTES_PER_WORKER
        results = self._engine.run(work, len(keys), urgency=urgency, timeout_s=timeout_s, workers=workers)
        if None in results:
            self._counters.missed_deadline()
        late = _Verdict(BlockStatus.FAILED, f"no answer within {timeout_s:g} s")
        verdicts = [late if result is None else result for result in results]
        self._warn_of_losses(operation, verdicts, keys)
        return verdicts

    def _warn_of_losses(self, operation: str, verdicts: Sequence[_Verdict], keys: Sequence[BlockKey]) -> None:
        statuses = [verdict.status for verdict in verdicts]
        corrupt, failed = statuses.count(BlockStatus.CORRUPT), statuses.count(BlockStatus.FAILED)
        if not corrupt and not failed:
            return
        first = next(i for i, s in enumerate(statuses) if s in (BlockStatus.CORRUPT, BlockStatus.FAILED))
        logger.warning(
            "%s %s: %d of %d blocks, %d missing, %d corrupt, %d failed; first %s: %s",
            operation,
            self._label,
            statuses.count(BlockStatus.DONE),
            len(statuses),
            statuses.count(BlockStatus.MISSING),
            corrupt,
            failed,
            self._layout.path(keys[first]),
            verdicts[first].reason,
        )

    def _prepare_directories(self) -> list[int | None]:
        directories = self._layout.directories

        def prepare(index: int, _scratch: Scratch, _lease: HostLease) -> _Prepared:
            temp_directory = f"{directories[index]}/{TEMP_DIRECTORY}"
            try:
                flags = prepare_directory(directories[index], f"{temp_directory}/probe.{new_writer_name()}")
                orphans = remove_orphans(temp_directory)
            except OSError as exc:
                raise StoreUnavailableError(
                    f"cannot keep blocks in {directories[index]}: {exc.strerror}; "
                    "name a directory in 'storage_backends' that this user can create and write"
                ) from exc
            if orphans:
                logger.info("removed %d unfinished files of dead writers from %s", orphans, temp_directory)
            return _Prepared(flags)

        timeout_s = self._config.dump_timeout_s
        results = self._engine.run(prepare, len(directories), urgency=Urgency.WRITE, timeout_s=timeout_s)
        for directory, result in zip(directories, results, strict=True):
            if result is None:
                raise StoreUnavailableError(f"cannot open {directory}: no answer within {timeout_s:g} s")
        return [result.in_place_flags for result in results if result is not None]

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"store {self._label} is closed")


def _failed(error: OSError) -> _Verdict:
    return _Verdict(BlockStatus.FAILED, f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}")


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise StoreUnavailableError(f"cannot list {directory}: {exc.strerror}") from exc


def _list_shards(directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in _names_in(directory) if is_shard_name(name)]
