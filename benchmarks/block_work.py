# SPDX-License-Identifier: MIT
"""Set, get and look up a batch of blocks: the same work for any store."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from typing import TYPE_CHECKING

from benchmarks.pages import PrivatePages
from benchmarks.pairs import LocalContestant, expect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Not `ucm.store.posix.layout`: the native store's process has another `ucm`.
_SHARD_HEX_DIGITS, _TEMP_DIRECTORY = 3, ".tmp"

_MOST_STORED_BYTES = 200_000_000

SET, GET, COLD, HIT, MISS = "set", "get", "cold get", "exists hit", "exists miss"
PHASES = (SET, HIT, GET, MISS)


def make_shards(directory: Path) -> None:
    """Make the directories that stores of ours below `directory` have after some thousand blocks."""
    for unfinished in list(directory.rglob(_TEMP_DIRECTORY)):
        for shard in range(16**_SHARD_HEX_DIGITS):
            (unfinished.parent / f"{shard:0{_SHARD_HEX_DIGITS}x}").mkdir(exist_ok=True)


class BlockWork(LocalContestant):
    """Works on one batch of blocks, under new keys in every round.

    Args:
        name: Of the store.
        directory: Where it keeps its files.
        page_bytes: Size of a block.
        count: Blocks of a batch.
    """

    def __init__(self, name: str, directory: Path, page_bytes: int, count: int) -> None:
        self.name = name
        self._directory = directory
        self.pages = PrivatePages(page_bytes, count)
        self.pages.fill()
        self._stored: list[bytes] = []

    @abstractmethod
    def set(self, keys: Sequence[bytes]) -> list[bool]:
        """Store the pages."""

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Load the pages."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Look the keys up."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the blocks; not timed."""

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the memory that a get has to restore; for a cold one also drop the page cache."""
        del round_number
        if phase in (GET, COLD):
            self.pages.spoil(len(self.pages))
        if phase == COLD:
            drop_from_page_cache(self._directory)

    def run(self, phase: str, round_number: int) -> object:
        """Make one call."""
        call = {SET: self.set, GET: self.get, COLD: self.get, HIT: self.exists, MISS: self.exists}[phase]
        return call(self._keys(round_number, is_stored=phase != MISS))

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check the verdicts, and after a get the bytes."""
        expect(result, [phase != MISS] * len(self.pages), f"{self.name}, {phase}, round {round_number}")
        if phase in (GET, COLD):
            self.pages.check(len(self.pages))

    def finish(self, round_number: int) -> None:
        """Free the space of the rounds so far, now and then: ext4 is slow to create files after deletions."""
        self._stored += self._keys(round_number, is_stored=True)
        if len(self._stored) * self.pages.page_bytes > _MOST_STORED_BYTES:
            self.remove(self._stored)
            self._stored = []

    def _keys(self, round_number: int, *, is_stored: bool) -> list[bytes]:
        return [
            hashlib.blake2b(f"{round_number} {page} {is_stored}".encode(), digest_size=16).digest()
            for page in range(len(self.pages))
        ]


def drop_from_page_cache(directory: Path) -> None:
    """Have the files below a directory read from the disk next time."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # Only what is on the disk can be dropped.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
