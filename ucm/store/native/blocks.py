# SPDX-License-Identifier: MIT
"""What is done with one block of a native store: NativeFiles and NativeObjects."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from ucm.store.errors import BlockCorruptError
from ucm.store.host_memory import copy
from ucm.store.interface import BlockStatus
from ucm.store.native.connector import NativeCallError
from ucm.store.posix.block_file import FOOTER_BYTES, check_footer, encode_footer, payload_checksum
from ucm.store.posix.blocks import (
    DONE,
    MISSING,
    STORED_ALREADY,
    BlockFiles,
    StoredBlocks,
    Verdict,
    failed,
)
from ucm.store.posix.durability import Durability
from ucm.store.posix.file_io import FileSystem, is_stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.interface import Block, BlockKey, StoreSpec
    from ucm.store.native.connector import NativeConnector
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.layout import BlockLayout
    from ucm.store.posix.lease import HostLease

UNFINISHED_SUFFIX = ".tmp"
"""What the native store appends to a file's name until the file is whole."""

# One of its engines says that a block is stored a moment before it is.
_SETTLING_PAUSES_S = (0.0, 0.0005, 0.002, 0.01, 0.05, 0.2, 0.5)
_REMEMBERED_DAMAGES = 4096
# To read the payload and the footer of one file, while others replace it.
_ATTEMPTS = 5


class NativeFiles(BlockFiles):
    """Blocks that the native store reads and writes, each a file as the embedded store has it.

    The native store takes an empty or short file for a block, damages the caller's memory
    when it loads one, and takes a read-only mount for an empty one. So we look at
    the files ourselves, and it gets to see only those that are whole.

    It moves payloads only, like UCM's own connector: instances with different block sizes
    refuse to share a directory. The footer is ours to append; until it is there, the
    file is a bare payload.

    Args:
        spec: What the blocks are.
        layout: Where they are; has one directory.
        connector: Moves them.
        accept_unverified: See `BlockFiles`.
    """

    def __init__(
        self, spec: StoreSpec, layout: BlockLayout, connector: NativeConnector, *, accept_unverified: bool
    ) -> None:
        super().__init__(
            spec,
            layout,
            [FileSystem()],
            accept_unverified=accept_unverified,
            durability=Durability.NONE,
        )
        self._connector = connector

    def load(self, block: Block, scratch: Scratch, lease: HostLease) -> Verdict:
        """Read a block into its segments."""
        path = self._layout.path(block.key)
        try:
            for _ in range(_ATTEMPTS):
                if not is_stored(path, self._written_sizes):
                    # Bare payloads, and all that is to be removed.
                    return super().load(block, scratch, lease)
                with _open_file(path, os.O_RDONLY) as descriptor:
                    footer = os.pread(descriptor, FOOTER_BYTES, self._spec.block_bytes)
                    self._connector.load(block.key)
                    try:
                        publish(self._connector.room(), footer, self._spec, block, lease)
                    except BlockCorruptError as exc:
                        if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
                            continue  # Payload and footer are of two files.
                        os.unlink(path)
                        return Verdict(BlockStatus.CORRUPT, str(exc))
                    return DONE
        except (FileNotFoundError, NotADirectoryError):
            return MISSING
        except OSError as exc:
            return failed(exc)
        except NativeCallError as exc:
            return Verdict(BlockStatus.FAILED, str(exc)) if os.path.exists(path) else MISSING
        return Verdict(BlockStatus.FAILED, "it is replaced again and again")

    def dump(self, block: Block, lease: HostLease) -> Verdict:
        """Store a block unless it is stored already.

        After the deadline it may still be stored, from memory of our own: late, but whole.
        """
        path = self._layout.path(block.key)
        try:
            # All native writers of a key prepare it under the same name, and mix their bytes.
            with exclusive(os.path.dirname(path)):
                if is_stored(path, self._written_sizes):
                    return STORED_ALREADY
                footer = stage(self._connector.room(), self._spec, block, lease)
                self._connector.dump(block.key)
                if not self._appears(path):
                    return Verdict(BlockStatus.FAILED, "it is not there")
                with _open_file(path, os.O_WRONLY) as descriptor:
                    os.pwrite(descriptor, footer, self._spec.block_bytes)
                return DONE
        except OSError as exc:
            return failed(exc)
        except NativeCallError as exc:
            return Verdict(BlockStatus.FAILED, str(exc))

    def _appears(self, path: str) -> bool:
        for pause_s in _SETTLING_PAUSES_S:
            time.sleep(pause_s)
            if is_stored(path, (self._spec.block_bytes,)):
                return True
        return False


class NativeObjects(StoredBlocks):
    """Blocks in a native store that keeps them who knows where.

    They cannot be removed. A damaged one counts as absent, here only, until it is stored anew.

    Args:
        spec: What the blocks are.
        connector: Moves them.
        name: What messages call the store.
    """

    def __init__(self, spec: StoreSpec, connector: NativeConnector, name: str) -> None:
        self._spec = spec
        self._connector = connector
        self._name = name
        self._damaged: OrderedDict[BlockKey, None] = OrderedDict()
        self._lock = threading.Lock()

    def where(self, key: BlockKey) -> str:
        """Return the store's name and the key."""
        return f"{self._name}:{key.hex()}"

    def look(self, key: BlockKey) -> Verdict:
        """Tell whether a block is stored."""
        try:
            return DONE if self._holds(key) else MISSING
        except NativeCallError as exc:
            return Verdict(BlockStatus.FAILED, str(exc))

    def load(self, block: Block, scratch: Scratch, lease: HostLease) -> Verdict:
        """Read a block into its segments."""
        del scratch
        try:
            if not self._holds(block.key):
                return MISSING
            self._connector.load(block.key)
            room, end = self._connector.room(), self._spec.block_bytes
            publish(room[:end], room[end:], self._spec, block, lease)
        except NativeCallError as exc:
            return self._after_failed_load(block.key, exc)
        except BlockCorruptError as exc:
            self._remember_damage(block.key)
            return Verdict(BlockStatus.CORRUPT, str(exc))
        return DONE

    def dump(self, block: Block, lease: HostLease) -> Verdict:
        """Store a block unless it is stored already."""
        try:
            if self._holds(block.key):
                return STORED_ALREADY
            room, end = self._connector.room(), self._spec.block_bytes
            room[end:] = stage(room[:end], self._spec, block, lease)
            self._connector.dump(block.key)
            if not self._connector.holds(block.key):
                return Verdict(BlockStatus.FAILED, "it is not there")
        except NativeCallError as exc:
            return Verdict(BlockStatus.FAILED, str(exc))
        with self._lock:
            self._damaged.pop(block.key, None)
        return DONE

    def delete(self, key: BlockKey) -> Verdict:
        """Fail: the native interface removes nothing."""
        del key
        return Verdict(BlockStatus.FAILED, "this store cannot remove blocks")

    def _holds(self, key: BlockKey) -> bool:
        return key not in self._damaged and self._connector.holds(key)

    def _after_failed_load(self, key: BlockKey, error: NativeCallError) -> Verdict:
        with contextlib.suppress(NativeCallError):
            if not self._connector.holds(key):
                return MISSING
        return Verdict(BlockStatus.FAILED, str(error))

    def _remember_damage(self, key: BlockKey) -> None:
        with self._lock:
            self._damaged[key] = None
            while len(self._damaged) > _REMEMBERED_DAMAGES:
                self._damaged.popitem(last=False)


def stage(room: memoryview, spec: StoreSpec, block: Block, lease: HostLease) -> bytes:
    """Copy a block's payload to `room` and return the footer to go with it.

    Raises:
        LeaseRevokedError: The caller no longer waits.
    """
    start = 0
    with lease:
        for segment in block.segments:
            room[start : start + segment.nbytes] = segment.cast("B")
            start += segment.nbytes
    return encode_footer(spec, block.key, payload_checksum([room]))


def publish(
    room: memoryview, footer: bytes | memoryview, spec: StoreSpec, block: Block, lease: HostLease
) -> None:
    """Verify the payload in `room` and copy it into the block's segments.

    Raises:
        BlockCorruptError: It is not what was written; the segments are left alone.
        LeaseRevokedError: The caller no longer waits.
    """
    if len(footer) != FOOTER_BYTES:
        raise BlockCorruptError("its footer is cut")
    check_footer(footer, spec, block.key, payload_checksum([room]))
    start = 0
    with lease:
        for segment in block.segments:
            copy(segment.cast("B"), room[start : start + segment.nbytes])
            start += segment.nbytes


@contextlib.contextmanager
def _open_file(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(shard: str) -> Iterator[None]:
    """Make `shard` if needed, and keep other processes' writers out of it, where the file system can."""
    os.makedirs(shard, exist_ok=True)
    with _open_file(shard, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def remove_unfinished(shard: str) -> int:
    """Remove what dead writers left in `shard`, unless somebody is writing there; return how many files."""
    try:
        left = [name for name in os.listdir(shard) if name.endswith(UNFINISHED_SUFFIX)]
        if not left:
            return 0
        with _open_file(shard, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in left:
                os.unlink(f"{shard}/{name}")
    except OSError:
        return 0
    return len(left)
