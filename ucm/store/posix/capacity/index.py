# SPDX-License-Identifier: MIT
"""BlockIndex: the blocks of a storage root by the minute of their last use."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.interface import BlockKey
from ucm.store.posix.layout import BlockLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

DISK_BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system's own blocks are."""

# Number of the namespace, key, disk blocks.
_RECORD = struct.Struct("<H16sI")


class Record(NamedTuple):
    """One block: where it belongs, and how much of the disk it takes."""

    namespace: str
    key: BlockKey
    disk_bytes: int


class BlockIndex:
    """What is known of every block, in 22 bytes each: 25 MB for a million of them.

    Not exact: a block can have been used later than it says here, have two records, or be gone.
    Whoever takes records out looks at the files.

    Attributes:
        disk_bytes: What all records take together.
    """

    def __init__(self) -> None:
        self.disk_bytes = 0
        self._namespaces: list[str] = []
        self._numbers: dict[str, int] = {}
        self._minutes: dict[int, bytearray] = {}

    def __len__(self) -> int:
        return sum(map(len, self._minutes.values())) // _RECORD.size

    def add(self, minute: int, record: Record) -> None:
        """Add a block that was last used in this minute."""
        number = self._numbers.get(record.namespace)
        if number is None:
            number = self._numbers[record.namespace] = len(self._namespaces)
            self._namespaces.append(record.namespace)
        packed = _RECORD.pack(number, record.key, record.disk_bytes // DISK_BLOCK_BYTES)
        self._minutes.setdefault(minute, bytearray()).extend(packed)
        self.disk_bytes += record.disk_bytes

    def minutes(self) -> list[int]:
        """Return the minutes that have records, the oldest first."""
        return sorted(self._minutes)

    def take(self, minute: int) -> Iterator[Record]:
        """Take all records of a minute out."""
        for number, key, blocks in _RECORD.iter_unpack(self._minutes.pop(minute, b"")):
            record = Record(self._namespaces[number], BlockKey(key), blocks * DISK_BLOCK_BYTES)
            self.disk_bytes -= record.disk_bytes
            yield record


def block_path(root: str, record: Record) -> str:
    """Return the file of a block that lies below this root."""
    directory = f"{root}/{record.namespace}" if record.namespace else root
    return f"{directory}/{BlockLayout.name(record.key)}"
