# SPDX-License-Identifier: MIT
"""What is done with one block, and the verdict on it; BlockFiles keeps blocks in files."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.errors import BlockCorruptError
from ucm.store.interface import BlockStatus
from ucm.store.posix.block_file import file_bytes
from ucm.store.posix.file_io import (
    is_stored,
    is_stored_already,
    read_block,
    read_block_promptly,
    read_piece,
    write_block,
)
from ucm.store.posix.writer import new_writer_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.interface import Block, BlockKey, StoreSpec
    from ucm.store.posix.durability import Durability
    from ucm.store.posix.file_io import FileSystem, Piece, Scratch
    from ucm.store.posix.layout import BlockLayout
    from ucm.store.posix.lease import HostLease


class Verdict(NamedTuple):
    """What became of one block, and why."""

    status: BlockStatus
    reason: str = ""


DONE = Verdict(BlockStatus.DONE)
UNVERIFIED = Verdict(BlockStatus.DONE, "nothing to verify it by")
STORED_ALREADY = Verdict(BlockStatus.DONE, "stored already")
MISSING = Verdict(BlockStatus.MISSING)


class StoredBlocks(ABC):
    """The stored blocks of one namespace.

    Those methods that end in `_now` never wait for storage, and return None where
    they would have to.

    Attributes:
        can_read_now: Whether `look_now` and `load_now` do anything.
        can_write_now: The same for `dump_now`.
        has_pieces: Whether parts of a block can be read, with `load_piece` and `load_piece_now`.
    """

    can_read_now = False
    can_write_now = False
    has_pieces = False

    @abstractmethod
    def where(self, key: BlockKey) -> str:
        """Return where a block is, for messages."""

    @abstractmethod
    def look(self, key: BlockKey) -> Verdict:
        """Tell whether a block is stored."""

    @abstractmethod
    def load(self, block: Block, scratch: Scratch, lease: HostLease) -> Verdict:
        """Read a block into its segments."""

    @abstractmethod
    def dump(self, block: Block, lease: HostLease) -> Verdict:
        """Store a block unless it is stored already."""

    @abstractmethod
    def delete(self, key: BlockKey) -> Verdict:
        """Remove a block; `MISSING` if there is none."""

    def look_now(self, key: BlockKey) -> Verdict | None:
        """See `look`."""
        raise NotImplementedError

    def load_now(self, block: Block, scratch: Scratch, lease: HostLease) -> Verdict | None:
        """See `load`."""
        raise NotImplementedError

    def dump_now(self, block: Block, lease: HostLease) -> Verdict | None:
        """See `dump`."""
        raise NotImplementedError

    def load_piece(self, key: BlockKey, piece: Piece, scratch: Scratch, lease: HostLease) -> bool:
        """Read a part of a block's stored form; True if it was all there.

        Raises:
            OSError: Storage failed, or there is no such block.
        """
        raise NotImplementedError

    def load_piece_now(self, key: BlockKey, piece: Piece, scratch: Scratch, lease: HostLease) -> bool | None:
        """See `load_piece`."""
        raise NotImplementedError


class BlockFiles(StoredBlocks):
    """The block files of one namespace.

    Args:
        spec: What the blocks are.
        layout: Where they are.
        file_systems: What can be relied on in each of the layout's directories.
        accept_unverified: Whether a file that is exactly a payload is a block.
        durability: What of a block survives a power loss.
    """

    has_pieces = True

    def __init__(
        self,
        spec: StoreSpec,
        layout: BlockLayout,
        file_systems: Sequence[FileSystem],
        *,
        accept_unverified: bool,
        durability: Durability,
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._file_systems = file_systems
        self._accept_unverified = accept_unverified
        self._durability = durability
        self._written_sizes = (file_bytes(spec),)
        self._stored_sizes = (*self._written_sizes, *((spec.block_bytes,) if accept_unverified else ()))
        self.can_read_now = any(found.in_memory or found.prompt for found in file_systems)
        self.can_write_now = any(found.in_memory for found in file_systems)

    def where(self, key: BlockKey) -> str:
        """Return the block's file."""
        return self._layout.path(key)

    def look(self, key: BlockKey) -> Verdict:
        """Tell whether a block of the right size is stored."""
        try:
            return DONE if is_stored(self._layout.path(key), self._stored_sizes) else MISSING
        except OSError as exc:
            return failed(exc)

    def look_now(self, key: BlockKey) -> Verdict | None:
        """See `look`."""
        found = self._file_system(key)
        if found.in_memory:
            return self.look(key)
        if found.prompt and found.prompt.is_stored(self._layout.name(key), self._stored_sizes):
            return DONE
        return None

    def load(self, block: Block, scratch: Scratch, lease: HostLease) -> Verdict:
        """Read a block into its segments."""
        path, found = self._layout.path(block.key), self._file_system(block.key)
        try:
            verified = read_block(
                path,
                self._spec,
                block,
                lease,
                scratch,
                found,
                accept_unverified=self._accept_unverified,
            )
        except (FileNotFoundError, NotADirectoryError):
            return MISSING
        except BlockCorruptError as exc:
            return Verdict(BlockStatus.CORRUPT, str(exc))
        except OSError as exc:
            return failed(exc)
        return DONE if verified else UNVERIFIED

    def load_now(self, block: Block, scratch: Scratch, lease: HostLease) -> Verdict | None:
        """See `load`."""
        found = self._file_system(block.key)
        if found.in_memory:
            return self.load(block, scratch, lease)
        name = self._layout.name(block.key)
        if found.prompt and read_block_promptly(found.prompt, name, self._spec, block, scratch):
            return DONE
        return None

    def dump(self, block: Block, lease: HostLease) -> Verdict:
        """Store a block unless it is stored already."""
        path = self._layout.path(block.key)
        preallocates = self._file_system(block.key).preallocates
        try:
            if is_stored_already(path, self._written_sizes):
                return STORED_ALREADY
            temp = self._layout.temp_path(block.key, new_writer_name())
            write_block(
                path,
                temp,
                self._spec,
                block,
                lease,
                preallocates=preallocates,
                durability=self._durability,
            )
        except OSError as exc:
            return failed(exc)
        return DONE

    def dump_now(self, block: Block, lease: HostLease) -> Verdict | None:
        """See `dump`."""
        return self.dump(block, lease) if self._file_system(block.key).in_memory else None

    def delete(self, key: BlockKey) -> Verdict:
        """Remove a block; `MISSING` if there is none."""
        try:
            os.unlink(self._layout.path(key))  # noqa: PTH108 -- no pathlib object for every block.
        except (FileNotFoundError, NotADirectoryError):
            return MISSING
        except OSError as exc:
            return failed(exc)
        return DONE

    def load_piece(self, key: BlockKey, piece: Piece, scratch: Scratch, lease: HostLease) -> bool:
        """Read a part of a block's file."""
        return read_piece(self._layout.path(key), piece, lease, scratch, self._file_system(key))

    def load_piece_now(self, key: BlockKey, piece: Piece, scratch: Scratch, lease: HostLease) -> bool | None:
        """See `load_piece`."""
        found = self._file_system(key)
        if found.in_memory:
            return self.load_piece(key, piece, scratch, lease)
        if found.prompt and found.prompt.read(self._layout.name(key), *piece):
            return True
        return None

    def _file_system(self, key: BlockKey) -> FileSystem:
        return self._file_systems[self._layout.root_index(key)]


def failed(error: OSError) -> Verdict:
    """Return the verdict on a block whose storage failed."""
    return Verdict(BlockStatus.FAILED, f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}")
