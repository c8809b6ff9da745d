# SPDX-License-Identifier: MIT
"""PromptDirectory: block files that can be had without waiting for storage, or not at all.

A caller may use it in its own thread. Every call on its way either answers from
memory or gives up, on the local file systems named below:

- `openat2` with `RESOLVE_CACHED` (Linux 5.12) fails where a name is not in the
  kernel's cache. Without links and mount points on the way it cannot leave the
  file system. Opening an existing file for reading, or with `O_PATH`, reads nothing there;
  `O_NONBLOCK` does not wait for the other end of a FIFO or the holder of a file lease.
- `fstat` of an open file answers from its inode, which is in memory.
- `cachestat` (Linux 6.5) tells whether all pages of a file are cached. Only then
  is it read, and with `RWF_NOWAIT`: alone, that flag would not wait for the data
  but may, for the file's block map, once it starts reading ahead.
- `O_NOATIME` keeps a read from writing the access time, which can wait for the
  journal. Only the file's owner may use it; others' files are left to the workers.
- `close` of a file that was only read writes nothing. If somebody has removed
  the file meanwhile it frees the blocks, as the removal itself would have.

What is not there is no answer either: a missing name is seldom cached.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs"})

# The same numbers on every architecture.
_SYS_OPENAT2, _SYS_CACHESTAT = 437, 451
_RESOLVE_NO_XDEV, _RESOLVE_NO_SYMLINKS, _RESOLVE_CACHED = 0x01, 0x04, 0x20
_ANY_READ_BIT = 0o444


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _CacheStatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


# Called without letting go of the GIL: getting it back takes longer than any of these calls.
_syscalls = ctypes.PyDLL(None)
_openat2 = ctypes.PYFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
)(("syscall", _syscalls))
_cachestat = ctypes.PYFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint
)(("syscall", _syscalls))


def _how(flags: int) -> _OpenHow:
    return _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_CACHED)


_LOOK = _how(os.O_PATH)
_READ = _how(os.O_RDONLY | os.O_NONBLOCK | os.O_NOATIME)
_LOOK_ADDRESS, _READ_ADDRESS = ctypes.addressof(_LOOK), ctypes.addressof(_READ)


class PromptDirectory:
    """A directory on one of `FILE_SYSTEMS`; open until it is no longer referenced."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    def works_with(self, name: str, size: int) -> bool:
        """Tell whether the kernel can do all this, by a file that has just been written."""
        return self.is_stored(name, (size,)) and self.read(name, [memoryview(bytearray(size + 1))], 0, size)

    def is_stored(self, name: str, sizes: Collection[int]) -> bool:
        """Tell whether `name` is certainly a readable regular file of one of these sizes."""
        descriptor = self.open_cached(name, _LOOK_ADDRESS)
        if descriptor < 0:
            return False
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        mode = found.st_mode
        return found.st_size in sizes and stat.S_ISREG(mode) and bool(mode & _ANY_READ_BIT)

    def read(self, name: str, buffers: Sequence[memoryview], start: int, size: int) -> bool:
        """Read `size` bytes of `name` from `start` on; False leaves the buffers in an unspecified state.

        Args:
            name: The file.
            buffers: Room for that; one byte more if the file has to end there.
            start: Offset in the file.
            size: How much is expected.
        """
        descriptor = self.open_cached(name, _READ_ADDRESS)
        if descriptor < 0:
            return False
        try:
            return (
                is_cached(descriptor, start, size)
                and os.preadv(descriptor, buffers, start, os.RWF_NOWAIT) == size
            )
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def open_cached(self, name: str, how: int) -> int:
        """Return a descriptor, or a negative number if it takes waiting or is not to be had at all."""
        return int(_openat2(_SYS_OPENAT2, self._descriptor, name.encode(), how, ctypes.sizeof(_OpenHow)))


def is_cached(descriptor: int, start: int, size: int) -> bool:
    """Tell whether `size` bytes of a file from `start` on are in the page cache; False if nobody can tell."""
    found = _CacheStat()
    wanted = _CacheStatRange(start, size)
    failed = _cachestat(_SYS_CACHESTAT, descriptor, ctypes.addressof(wanted), ctypes.addressof(found), 0)
    return not failed and int(found.cached) * mmap.PAGESIZE >= size
