# SPDX-License-Identifier: MIT
"""Block files: whole or not at all, exact or refused.

Storage may hang. Calls that can wait for it never hold the lease; see `HostLease`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.errors import BlockCorruptError
from ucm.store.posix import prompt
from ucm.store.posix.block_file import (
    FOOTER_BYTES,
    check_footer,
    checksum_of,
    encode_footer,
    file_bytes,
    hash_pieces,
    is_footer_of,
    payload_checksum,
)
from ucm.store.posix.reading import (
    DIRECT_BYTES,
    DirectReads,
    IoMode,
    read_buffered,
    read_direct,
    read_in_place,
    unfilled,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ucm.store.interface import Block, BlockKey, StoreSpec
    from ucm.store.posix.durability import Durability
    from ucm.store.posix.lease import HostLease

# The usual size; where others are in use it is merely memory aligned to that.
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_WIPEONFORK = 18  # Linux 4.14; Python has no name for it.
_FILE_MODE = 0o644
_ANY_READ_BIT = 0o444
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
# Elsewhere the C library would write the file block by block.
_PREALLOCATING_FILE_SYSTEMS = frozenset({"ext4", "xfs"})
# Below, it costs more than it gains.
_PREALLOCATED_BYTES = 512 * 1024


class FileSystem(NamedTuple):
    """What can be relied on in one directory.

    Args:
        in_memory: Nothing there waits for storage.
        in_place_flags: `preadv` flags with which reading never waits for storage, so
            that the kernel may copy straight into the segments; None if there are none.
        tells_cached: It can tell whether a file is in the page cache.
        prompt: What is in the page cache can be had from here at once.
        direct: How files are read around the page cache; None if they never are.
        preallocates: Asking for the space of a large file first makes writing it cheaper.
    """

    in_memory: bool = False
    in_place_flags: int | None = None
    tells_cached: bool = False
    prompt: prompt.PromptDirectory | None = None
    direct: DirectReads | None = None
    preallocates: bool = False


class Piece(NamedTuple):
    """A part of a file, and where its bytes go.

    Args:
        buffers: Count as one; have room for one byte more if the file has to end there.
        start: Offset in the file, a multiple of `reading.ALIGNMENT`.
        size: Bytes.
    """

    buffers: Sequence[memoryview]
    start: int
    size: int


class Scratch:
    """One worker's private memory, reused from block to block.

    Attributes:
        tail: Room for a footer and one byte more; a file that fills that byte is too long.
    """

    __slots__ = ("_bounce", "tail")

    def __init__(self) -> None:
        self.tail = memoryview(bytearray(FOOTER_BYTES + 1))
        self._bounce: memoryview | None = None

    @property
    def bounce(self) -> memoryview:
        """Room that a read may hang in for as long as it likes; contiguous in physical memory if possible."""
        if self._bounce is None:
            self._bounce = _huge_page()
        return self._bounce


def _huge_page() -> memoryview:
    """Return `_HUGE_PAGE_BYTES` of memory, in one page where the kernel has one.

    A disk is told the physical ranges that its data goes to. A virtual disk was measured to take up to 2.7
    times as long for ranges of 4,096 bytes as for huge pages.
    """
    # Shared memory, Python's default, has no huge pages as a rule. Twice the room has an aligned half;
    # the rest is never touched.
    room = mmap.mmap(-1, 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork during a direct read would have the kernel copy what the disk is writing to; see open(2).
    for advice in (_MADV_WIPEONFORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # Kernels can be built without huge pages.
            room.madvise(advice)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start = -address % _HUGE_PAGE_BYTES
    return memoryview(room)[start : start + _HUGE_PAGE_BYTES]


def is_stored(path: str, sizes: Collection[int]) -> bool:
    """Tell whether `path` is a readable regular file of one of these sizes.

    Raises:
        OSError: Storage failed; a missing file or directory is no failure.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    mode = found.st_mode
    return found.st_size in sizes and stat.S_ISREG(mode) and bool(mode & _ANY_READ_BIT)


def is_stored_already(path: str, sizes: Collection[int]) -> bool:
    """Tell the same before writing, at half the cost where there is nothing, as of most blocks.

    What cannot be looked at counts as absent: writing it will tell what is wrong.

    Raises:
        OSError: Storage failed on a file that it had just found.
    """
    return os.access(path, os.F_OK) and is_stored(path, sizes)


def read_block(
    path: str,
    spec: StoreSpec,
    block: Block,
    lease: HostLease,
    scratch: Scratch,
    found: FileSystem,
    *,
    accept_unverified: bool,
) -> bool:
    """Fill the block's segments from `path` and verify them.

    Args:
        path: The block's file.
        spec: The store that wants it.
        block: Its key and segments.
        lease: Guards the segments.
        scratch: The calling worker's.
        found: What can be relied on there.
        accept_unverified: A file that is exactly a payload will do.

    Returns:
        False for such a file.

    Raises:
        FileNotFoundError: There is no such block.
        BlockCorruptError: It is not what was written; the file has been removed.
        LeaseRevokedError: The caller no longer waits.
        OSError: Storage failed.
    """
    descriptor, flags = _open_for_reading(path)
    try:
        whole = Piece([*block.segments, scratch.tail], 0, file_bytes(spec))
        wanted = whole.size
        done = _read(descriptor, flags, whole, lease, scratch, found)
        if done == spec.block_bytes and accept_unverified:
            return False
        if done != wanted:
            length = "longer" if done > wanted else "shorter"
            raise BlockCorruptError(f"{length} than {wanted} bytes")
        with lease:
            checksum = payload_checksum(block.segments)
        check_footer(scratch.tail[:FOOTER_BYTES], spec, block.key, checksum)
        return True
    except BlockCorruptError:
        # Kept, it would fail every later request; removed, the next dump writes it anew.
        _remove_if_same(path, descriptor)
        raise
    finally:
        os.close(descriptor)


def read_piece(path: str, piece: Piece, lease: HostLease, scratch: Scratch, found: FileSystem) -> bool:
    """Read a part of a file; tell whether all of it is there, and nothing behind it if it is the last one.

    Raises:
        LeaseRevokedError: The caller no longer waits.
        OSError: Storage failed.
    """
    descriptor, flags = _open_for_reading(path)
    try:
        return _read(descriptor, flags, piece, lease, scratch, found) == piece.size
    finally:
        os.close(descriptor)


def _read(
    descriptor: int, flags: int, piece: Piece, lease: HostLease, scratch: Scratch, found: FileSystem
) -> int:
    """Read from the page cache what is there, then the rest; return how many bytes.

    `flags` are those that the file is open with.
    """
    done = _read_cached(descriptor, flags, piece, lease, scratch, found)
    return done if done >= piece.size else _read_stored(descriptor, flags, piece, done, lease, scratch, found)


def _read_cached(
    descriptor: int, flags: int, piece: Piece, lease: HostLease, scratch: Scratch, found: FileSystem
) -> int:
    """Read what is in memory; return how many bytes, which may be none."""
    in_place_flags = found.in_place_flags
    if in_place_flags is None:
        return 0
    # Inside the lease nothing may wait: not for data, nor for the journal to take an access time.
    buffers, start, size = piece
    if found.in_memory or (
        flags & os.O_NOATIME and found.tells_cached and prompt.is_cached(descriptor, start, size)
    ):
        with lease:
            return read_in_place(descriptor, buffers, start, in_place_flags)
    if found.tells_cached or found.direct is None:
        return 0
    return read_buffered(descriptor, buffers, start, 0, lease, scratch.bounce, flags=in_place_flags)


def _read_stored(
    descriptor: int,
    flags: int,
    piece: Piece,
    done: int,
    lease: HostLease,
    scratch: Scratch,
    found: FileSystem,
) -> int:
    """Go on after `done` bytes with what has to be waited for."""
    buffers, start, size = piece
    if found.direct is not None and found.direct.work and size >= DIRECT_BYTES:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            done, at_end = read_direct(descriptor, buffers, start, done, lease, scratch.bounce)
        except OSError as exc:
            found.direct.refuse_if_that_is_why(exc)
            at_end = False
        if at_end and done >= size:
            return done
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return read_buffered(descriptor, buffers, start, done, lease, scratch.bounce)


def _open_for_reading(path: str) -> tuple[int, int]:
    """Open a block file; return its descriptor and flags, among them O_NOATIME if we may have it."""
    # O_NONBLOCK has no meaning for files, but opening a FIFO without it would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_NOATIME), flags | os.O_NOATIME
    except PermissionError:  # Only the owner may.
        return os.open(path, flags), flags


def read_block_promptly(
    directory: prompt.PromptDirectory, name: str, spec: StoreSpec, block: Block, scratch: Scratch
) -> bool:
    """Fill the block's segments from `name` if that needs no waiting; True if they are verified.

    Whatever else there is about the file, `read_block` finds out.
    """
    if not directory.read(name, [*block.segments, scratch.tail], 0, file_bytes(spec)):
        return False
    return is_footer_of(scratch.tail[:FOOTER_BYTES], spec, block.key, payload_checksum(block.segments))


def _remove_if_same(path: str, descriptor: int) -> None:
    """Unlink `path` unless another file took the place of the open one."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.unlink(path)


def write_block(
    path: str,
    temp: str,
    spec: StoreSpec,
    block: Block,
    lease: HostLease,
    *,
    preallocates: bool,
    durability: Durability,
) -> None:
    """Write the block to `temp` and rename it to `path`, or leave nothing behind.

    The rename happens only while the caller still waits: later it may already have
    changed the segments. A `pwritev` stuck in storage can still be reading
    them then, into a file that nobody will ever see.

    Raises:
        LeaseRevokedError: The caller no longer waits.
        OSError: Storage failed.
    """
    footer = encode_footer(spec, block.key, checksum_of(_in_steps(hash_pieces(block.segments), lease)))
    lease.step()
    descriptor = _create(temp)
    try:
        try:
            lease.step()
            if preallocates and spec.block_bytes >= _PREALLOCATED_BYTES:
                os.posix_fallocate(descriptor, 0, file_bytes(spec))
                lease.step()
            _write_all(descriptor, [*block.segments, memoryview(footer)], lease)
            lease.step()
            durability.secure_data(descriptor)
        finally:
            os.close(descriptor)  # Network file systems report a full disk here.
        lease.step()
        durability.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _in_steps(pieces: Iterable[memoryview], lease: HostLease) -> Iterator[memoryview]:
    """Give the lease for each piece, and let others go first before it."""
    for piece in pieces:
        lease.step()
        with lease:
            yield piece


def _create(temp: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(temp, flags, _FILE_MODE)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(temp), exist_ok=True)
        return os.open(temp, flags, _FILE_MODE)


def _write_all(descriptor: int, buffers: Sequence[memoryview], lease: HostLease) -> None:
    total = sum(buffer.nbytes for buffer in buffers)
    done = os.pwritev(descriptor, buffers, 0)
    while done < total:
        # A short write has no reason to give; the next one brings the error, a full disk mostly.
        lease.step()
        done += os.pwritev(descriptor, unfilled(buffers, done), done)


def is_block_of(path: str, spec: StoreSpec, key: BlockKey) -> bool:
    """Tell by its size and footer whether `path` is a readable block of `spec`; leaves the payload alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size != file_bytes(spec):
            return False
        return is_footer_of(os.pread(descriptor, FOOTER_BYTES, spec.block_bytes), spec, key)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def prepare_directory(directory: str, probe_name: str, io_mode: IoMode) -> FileSystem:
    """Create `directory`, prove that files can be written in it, and say what can be relied on there.

    Args:
        directory: To be created with its parents.
        probe_name: A file to write and remove again, below `directory`.
        io_mode: How its files are to be read.

    Raises:
        OSError: It cannot be created or written.
    """
    probe = f"{directory}/{probe_name}"
    os.makedirs(os.path.dirname(probe), exist_ok=True)
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    try:
        size = os.pwrite(descriptor, b"probe", 0)
        kind = _file_system_of(descriptor)
        if kind in _MEMORY_FILE_SYSTEMS:
            return FileSystem(in_memory=True, in_place_flags=0)
        direct = None
        if io_mode is not IoMode.BUFFERED:
            direct = DirectReads(directory)
            direct.probe(descriptor)
        if io_mode is IoMode.DIRECT and direct is not None and direct.work:
            return FileSystem(direct=direct, preallocates=kind in _PREALLOCATING_FILE_SYSTEMS)
        at_once = prompt.PromptDirectory(directory) if kind in prompt.FILE_SYSTEMS else None
        return FileSystem(
            in_place_flags=os.RWF_NOWAIT if _reads_without_waiting(descriptor) else None,
            tells_cached=prompt.is_cached(descriptor, 0, size),
            prompt=at_once if at_once and at_once.works_with(probe_name, size) else None,
            direct=direct,
            preallocates=kind in _PREALLOCATING_FILE_SYSTEMS,
        )
    finally:
        os.close(descriptor)
        os.unlink(probe)


def _reads_without_waiting(descriptor: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError as exc:
        if exc.errno != errno.EOPNOTSUPP:
            raise
        return False
    return True


def _file_system_of(descriptor: int) -> str:
    """Return the file system's type by the device number; "" if it is not listed."""
    device = os.fstat(descriptor).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            mount, _, file_system = line.partition(" - ")
            if mount.split()[2] == wanted:
                return file_system.split()[0]
    return ""
