# SPDX-License-Identifier: MIT
"""Large blocks read by several threads each, where a batch has too few blocks to keep them busy.

The state of a linear-attention model is one block of many megabytes for a whole prefix: read by one
thread it would wait for one request at a time, and for one processor's copying.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ucm.store.posix.block_file import FOOTER_BYTES, file_bytes, is_footer_of, payload_checksum
from ucm.store.posix.blocks import DONE, Verdict
from ucm.store.posix.file_io import Piece
from ucm.store.posix.reading import ALIGNMENT, unfilled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.interface import Block, BlockKey, StoreSpec
    from ucm.store.posix.blocks import StoredBlocks
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.lease import HostLease

    Read = Callable[[BlockKey, Piece, Scratch, HostLease], "bool | None"]

# Smaller pieces cost more than they gain where the data is cached and no processor idle.
_LEAST_BYTES = 4 * 1024 * 1024
# A block that hangs keeps no more workers than that.
_MOST_PIECES = 4
# Batches with that many blocks keep the threads busy by themselves.
_BUSY = 8


def pieces_of(block_bytes: int, blocks: int) -> int:
    """Return into how many pieces to cut each of so many blocks of one batch."""
    return max(1, min(_MOST_PIECES, block_bytes // _LEAST_BYTES, _BUSY // max(1, blocks)))


class LargeBlock:
    """A block on its way from storage in pieces; whoever comes last verifies the whole.

    Anything out of the ordinary is left to `StoredBlocks.load`, which then starts anew: a
    file that is missing, cut or damaged, or that was replaced between two pieces.

    Args:
        spec: What the block is.
        block: Where it goes.
        files: Where it is.
        pieces: How many times `load` will be called.
    """

    # The verdict on all pieces but the last.
    UNDER_WAY = Verdict(DONE.status, "a piece")

    def __init__(self, spec: StoreSpec, block: Block, files: StoredBlocks, pieces: int) -> None:
        self._spec = spec
        self._block = block
        self._files = files
        self._left = itertools.count(pieces - 1, -1)  # Taking the next number is one step.
        self._pieces = cut(spec.block_bytes, pieces)
        self._is_whole = True
        self._footer = b""

    def load(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict:
        """Read a piece, in a worker; a verdict on the block if it was the last."""
        try:
            if not self._read(index, scratch, lease, self._files.load_piece):
                self._is_whole = False
        except OSError:
            self._is_whole = False
        if next(self._left) > 0:
            return self.UNDER_WAY
        return self._verify(lease) or self._files.load(self._block, scratch, lease)

    def load_now(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict | None:
        """Do the same in the caller's thread; None where it would have to wait for storage."""
        try:
            done = self._read(index, scratch, lease, self._files.load_piece_now)
        except OSError:
            done = False
        if done is None:
            return None
        if not done:
            self._is_whole = False
        if next(self._left) > 0:
            return self.UNDER_WAY
        # A worker that then does the piece once more finds that it is the last one, too.
        return self._verify(lease) or self._files.load_now(self._block, scratch, lease)

    def _read(self, index: int, scratch: Scratch, lease: HostLease, read: Read) -> bool | None:
        start, stop = self._pieces[index]
        buffers = part_of(self._block.segments, start, stop)
        is_last = stop == self._spec.block_bytes
        if is_last:
            buffers.append(scratch.tail)
            stop = file_bytes(self._spec)
        done = read(self._block.key, Piece(buffers, start, stop - start), scratch, lease)
        if is_last and done:
            self._footer = bytes(scratch.tail[:FOOTER_BYTES])
        return done

    def _verify(self, lease: HostLease) -> Verdict | None:
        if not self._is_whole:
            return None
        with lease:
            checksum = payload_checksum(self._block.segments)
        return DONE if is_footer_of(self._footer, self._spec, self._block.key, checksum) else None


def cut(size: int, pieces: int) -> list[tuple[int, int]]:
    """Return where pieces of about the same size start and stop; each starts aligned."""
    step = -(-size // pieces)
    step += -step % ALIGNMENT
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def part_of(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return views of the bytes from `start` to `stop` of buffers that count as one."""
    left = stop - start
    part = []
    for buffer in unfilled(buffers, start):
        if not left:
            break
        part.append(buffer[:left])
        left -= part[-1].nbytes
    return part
