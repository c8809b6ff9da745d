# SPDX-License-Identifier: MIT
"""How a worker reads a file: in place, through memory of its own, or around the page cache.

Only a read that cannot wait goes straight into the caller's memory. All others go through the worker's
bounce buffer, from where they are copied while the caller still waits.

After a restart the data is not in the page cache, and a disk gives it to `O_DIRECT` several times as fast
as to buffered reads; what is in the page cache comes faster from there.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import logging
import mmap
import os
from typing import TYPE_CHECKING

from ucm.store.host_memory import copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.posix.lease import HostLease

logger = logging.getLogger(__name__)

# Of a block smaller than that, the page cache's read-ahead is one request as well.
DIRECT_BYTES = 64 * 1024
# Offsets and lengths of direct reads; no device in use asks for more.
ALIGNMENT = 4096
_SECTOR_BYTES = 512
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class IoMode(enum.Enum):
    """How blocks are read."""

    AUTO = "auto"  # From the page cache what is there, the rest around it.
    BUFFERED = "buffered"  # Through the page cache.
    DIRECT = "direct"  # Around the page cache.


class DirectReads:
    """Whether one directory's files can be read around the page cache.

    Attributes:
        work: False from the first refusal on.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.work = True

    def probe(self, descriptor: int) -> None:
        """Find out by a file that has just been written."""
        with memoryview(mmap.mmap(-1, ALIGNMENT)) as room:
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
                os.preadv(descriptor, [room], 0)
            except OSError as exc:
                self.refuse_if_that_is_why(exc)
            finally:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)

    def refuse_if_that_is_why(self, error: OSError) -> None:
        """Give direct reads up if the file system cannot do them; raises any other error again."""
        if error.errno not in _REFUSALS:
            raise error
        if self.work:
            self.work = False
            logger.warning(
                "%s cannot be read around the page cache (%s): reading through it",
                self._directory,
                error.strerror,
            )


def read_in_place(descriptor: int, buffers: Sequence[memoryview], start: int, flags: int) -> int:
    """Read from offset `start` what can be had at once, which may be nothing; return how many bytes."""
    try:
        return os.preadv(descriptor, buffers, start, flags)
    except BlockingIOError:
        return 0
    except OSError as exc:
        if exc.errno != errno.EOPNOTSUPP:
            raise
        return 0  # Another file system is mounted below the root.


def read_buffered(
    descriptor: int,
    buffers: Sequence[memoryview],
    start: int,
    done: int,
    lease: HostLease,
    bounce: memoryview,
    *,
    flags: int = 0,
) -> int:
    """Go on after `done` bytes of the buffers, which begin at offset `start` of the file.

    Returns:
        How many are done at the end of the file or of the buffers; with `RWF_NOWAIT` as
        flags, also where data would have to be waited for.
    """
    total = sum(buffer.nbytes for buffer in buffers)
    while done < total:
        piece = bounce[: total - done]
        try:
            count = os.preadv(descriptor, [piece], start + done, flags)
        except BlockingIOError:
            break
        if not count:
            break
        with lease:
            scatter(piece[:count], buffers, done)
        done += count
    return done


def read_direct(
    descriptor: int,
    buffers: Sequence[memoryview],
    start: int,
    done: int,
    lease: HostLease,
    bounce: memoryview,
) -> tuple[int, bool]:
    """Do the same around the page cache, with a file open for that, from the aligned offset before `done` on.

    `start` has to be aligned.

    Returns:
        How many bytes are done after the first short read; and whether that is certainly the end of the
        file or of the buffers.

    Raises:
        OSError: EINVAL if the file system cannot do it.
    """
    total = sum(buffer.nbytes for buffer in buffers)
    done -= done % ALIGNMENT
    while done < total:
        wanted = total - done
        piece = bounce[: wanted + -wanted % ALIGNMENT]
        count = os.preadv(descriptor, [piece], start + done)
        with lease:
            scatter(piece[: min(count, wanted)], buffers, done)
        done += min(count, wanted)
        if count < piece.nbytes:
            # A direct read cannot go on in the middle of a sector, nor does it stop there but at the end.
            return done, bool(count % _SECTOR_BYTES)
    return done, True


def scatter(piece: memoryview, buffers: Sequence[memoryview], offset: int) -> None:
    """Copy `piece`, which is writable, to `offset` of the buffers, which count as one."""
    for view in unfilled(buffers, offset):
        if not piece.nbytes:
            break
        size = min(view.nbytes, piece.nbytes)
        copy(view, piece[:size])
        piece = piece[size:]


def unfilled(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of `buffers` after their first `done` bytes."""
    left = []
    for buffer in buffers:
        skipped = min(done, buffer.nbytes)
        done -= skipped
        if skipped < buffer.nbytes:
            # The cast lets views of ctypes arrays ("<B") take slices of other memory.
            left.append(buffer.cast("B")[skipped:])
    return left
