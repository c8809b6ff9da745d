# SPDX-License-Identifier: MIT
"""What of a block is certain to survive a power loss."""

from __future__ import annotations

import contextlib
import enum
import os


class Durability(enum.Enum):
    """How far a dump goes before it says that a block is stored.

    In no mode a damaged block is ever loaded: its length and checksum tell.
    """

    NONE = "none"  # Nothing is flushed: a recent block may be lost, empty, or full of zeros.
    DATA = "data"  # The file is flushed before it gets its name: it is whole, or it is not there.
    FULL = "full"  # Its name is flushed too: what was said to be stored is there.

    def secure_data(self, descriptor: int) -> None:
        """Flush a file's bytes, before it gets its name."""
        if self is not Durability.NONE:
            os.fdatasync(descriptor)

    def rename(self, temp: str, path: str) -> None:
        """Give a file its name, in a directory that is made if needed."""
        try:
            os.rename(temp, path)
        except FileNotFoundError:
            self._make_directory(os.path.dirname(path))
            os.rename(temp, path)
        if self is Durability.FULL:
            _flush_directory(os.path.dirname(path))

    def _make_directory(self, directory: str) -> None:
        parent = os.path.dirname(directory)
        try:
            os.mkdir(directory)
        except FileNotFoundError:
            self._make_directory(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
        except FileExistsError:
            pass
        if self is Durability.FULL:
            _flush_directory(parent)


def _flush_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
