# SPDX-License-Identifier: MIT
"""PosixStore: one pool's namespace of block files, on the engine that all stores share."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ucm.store.counters import StoreCounters
from ucm.store.errors import StoreConfigError, StoreUnavailableError
from ucm.store.interface import Block, BlockKey, BlockStatus, KVStore, StoreSpec, StoreStats, check_blocks
from ucm.store.posix.blocks import DONE, UNVERIFIED, BlockFiles, Verdict
from ucm.store.posix.call import Call
from ucm.store.posix.engine import SharedEngine, Urgency
from ucm.store.posix.file_io import is_block_of, prepare_directory
from ucm.store.posix.layout import TEMP_DIRECTORY, BlockLayout, is_shard_name, key_of
from ucm.store.posix.writer import new_writer_name, remove_orphans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.store.posix.config import PosixStoreConfig
    from ucm.store.posix.file_io import FileSystem, Scratch
    from ucm.store.posix.lease import HostLease

logger = logging.getLogger(__name__)

# The kernel takes 1024 buffers in one call; the footer is one of them.
_MAX_SEGMENTS = 1000
_SHARDS_PER_SCAN_BATCH = 64
_LOSSES = (BlockStatus.CORRUPT, BlockStatus.FAILED)

_T = TypeVar("_T")


class PosixStore(KVStore):
    """One namespace of block files below the storage roots.

    All I/O that may wait for storage happens on the engine's workers, so a hung file
    system costs a caller no more than the deadline. After a dump has missed its deadline the
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
        self._counters = StoreCounters(spec.block_bytes)
        self._close_lock = threading.Lock()
        self._closed = False
        self._engine = SharedEngine.acquire(config.io_threads)
        try:
            self._files = BlockFiles(
                spec,
                self._layout,
                self._prepare_directories(),
                accept_unverified=config.accept_unverified,
            )
        except BaseException:
            self.close()
            raise

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.lookup_call(keys).run(time.monotonic())

    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        return self.load_call(blocks).run(time.monotonic())

    def dump(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        return self.dump_call(blocks).run(time.monotonic())

    def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._require_open()
        timeout_s = self._config.dump_timeout_s

        def finish(verdicts: Sequence[Verdict | None]) -> list[bool]:
            judged = self._judge("delete", keys, verdicts, timeout_s)
            return [verdict.status is BlockStatus.DONE for verdict in judged]

        call = Call(
            engine=self._engine,
            count=len(keys),
            work=lambda index, _scratch, _lease: self._files.delete(keys[index]),
            urgency=Urgency.WRITE,
            timeout_s=timeout_s,
            finish=finish,
        )
        return call.run(time.monotonic())

    def lookup_call(self, keys: Sequence[BlockKey]) -> Call[list[bool]]:
        """Return a lookup to be run together with those of other stores."""
        self._require_open()
        files, timeout_s = self._files, self._config.lookup_timeout_s

        def finish(verdicts: Sequence[Verdict | None]) -> list[bool]:
            judged = self._judge("lookup", keys, verdicts, timeout_s)
            found = [verdict.status is BlockStatus.DONE for verdict in judged]
            self._counters.looked_up(found)
            return found

        return Call(
            engine=self._engine,
            count=len(keys),
            work=lambda index, _scratch, _lease: files.look(keys[index]),
            attempt=(lambda index, _scratch, _lease: files.look_now(keys[index]))
            if files.can_read_now
            else None,
            urgency=Urgency.READ,
            timeout_s=timeout_s,
            finish=finish,
        )

    def load_call(self, blocks: Sequence[Block]) -> Call[list[BlockStatus]]:
        """Return a load to be run together with those of other stores."""
        self._require_open()
        check_blocks(self.spec, blocks, writable=True)
        files, timeout_s = self._files, self._config.load_timeout_s

        def finish(verdicts: Sequence[Verdict | None]) -> list[BlockStatus]:
            judged = self._judge("load", [block.key for block in blocks], verdicts, timeout_s)
            statuses = [verdict.status for verdict in judged]
            self._counters.loaded(statuses, unverified=judged.count(UNVERIFIED))
            return statuses

        return Call(
            engine=self._engine,
            count=len(blocks),
            work=lambda index, scratch, lease: files.load(blocks[index], scratch, lease),
            attempt=(lambda index, scratch, lease: files.load_now(blocks[index], scratch, lease))
            if files.can_read_now
            else None,
            urgency=Urgency.READ,
            timeout_s=timeout_s,
            moved_bytes=len(blocks) * self.spec.block_bytes,
            finish=finish,
        )

    def dump_call(self, blocks: Sequence[Block]) -> Call[list[BlockStatus]]:
        """Return a dump to be run together with those of other stores."""
        self._require_open()
        check_blocks(self.spec, blocks, writable=False)
        files, timeout_s = self._files, self._config.dump_timeout_s

        def finish(verdicts: Sequence[Verdict | None]) -> list[BlockStatus]:
            judged = self._judge("dump", [block.key for block in blocks], verdicts, timeout_s)
            statuses = [verdict.status for verdict in judged]
            self._counters.dumped(judged.count(DONE), statuses.count(BlockStatus.FAILED))
            return statuses

        return Call(
            engine=self._engine,
            count=len(blocks),
            work=lambda index, _scratch, lease: files.dump(blocks[index], lease),
            attempt=(lambda index, _scratch, lease: files.dump_now(blocks[index], lease))
            if files.can_write_now
            else None,
            urgency=Urgency.WRITE,
            timeout_s=timeout_s,
            moved_bytes=len(blocks) * self.spec.block_bytes,
            finish=finish,
        )

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

    def _judge(
        self,
        operation: str,
        keys: Sequence[BlockKey],
        verdicts: Sequence[Verdict | None],
        timeout_s: float,
    ) -> list[Verdict]:
        """Replace verdicts that did not come in time, and tell what was lost."""
        judged = [verdict for verdict in verdicts if verdict is not None]
        if len(judged) < len(verdicts):
            self._counters.missed_deadline()
            late = Verdict(BlockStatus.FAILED, f"no answer within {timeout_s:g} s")
            judged = [late if verdict is None else verdict for verdict in verdicts]
        lost = [index for index, verdict in enumerate(judged) if verdict.status in _LOSSES]
        if lost:
            self._warn_of_losses(operation, judged, keys, lost[0])
        return judged

    def _warn_of_losses(
        self, operation: str, verdicts: Sequence[Verdict], keys: Sequence[BlockKey], first: int
    ) -> None:
        statuses = [verdict.status for verdict in verdicts]
        logger.warning(
            "%s %s: %d of %d blocks, %d missing, %d corrupt, %d failed; first %s: %s",
            operation,
            self._label,
            statuses.count(BlockStatus.DONE),
            len(statuses),
            statuses.count(BlockStatus.MISSING),
            statuses.count(BlockStatus.CORRUPT),
            statuses.count(BlockStatus.FAILED),
            self._layout.path(keys[first]),
            verdicts[first].reason,
        )

    def _prepare_directories(self) -> list[FileSystem]:
        directories = self._layout.directories

        def prepare(index: int, _scratch: Scratch, _lease: HostLease) -> FileSystem:
            try:
                found = prepare_directory(directories[index], f"{TEMP_DIRECTORY}/probe.{new_writer_name()}")
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

        timeout_s = self._config.dump_timeout_s
        results = self._engine.run(prepare, len(directories), urgency=Urgency.WRITE, timeout_s=timeout_s)
        for directory, result in zip(directories, results, strict=True):
            if result is None:
                raise StoreUnavailableError(f"cannot open {directory}: no answer within {timeout_s:g} s")
        return [result for result in results if result is not None]

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"store {self._label} is closed")


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise StoreUnavailableError(f"cannot list {directory}: {exc.strerror}") from exc


def _list_shards(directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in _names_in(directory) if is_shard_name(name)]
