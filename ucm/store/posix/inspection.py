# SPDX-License-Identifier: MIT
"""Look at a storage root from outside: what is in it, whether it is whole, and what nobody needs.

Nothing here needs to know a model: a block file says itself what it is.
"""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.errors import BlockCorruptError
from ucm.store.interface import StoreSpec
from ucm.store.posix.block_file import FOOTER_BYTES, MAGIC, check_footer, payload_checksum
from ucm.store.posix.layout import TEMP_DIRECTORY
from ucm.store.posix.tree import BlockEntry, block_entries, namespace_directory, shards, strays
from ucm.store.posix.writer import find_orphans

if TYPE_CHECKING:
    from collections.abc import Iterator

_DISK_BLOCK_BYTES = 512
_IDENTITY = slice(24, 40)
# A stray file may be what another program is just writing.
_SETTLED_S = 3600.0


@dataclass(slots=True)
class NamespaceSummary:
    """What one namespace holds.

    Args:
        blocks: Number of block files.
        disk_bytes: What they take in storage.
        oldest_ns: The least recent use, or write where no capacity is set, since the epoch.
        newest_ns: The most recent one.
    """

    blocks: int = 0
    disk_bytes: int = 0
    oldest_ns: int = 0
    newest_ns: int = 0


class Condition(enum.Enum):
    """What a block file is worth."""

    GOOD = "good"
    UNVERIFIABLE = "no footer"  # UCM's native store writes none; or it is damaged.
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


class Verdict(NamedTuple):
    """A block file's condition, and why."""

    condition: Condition
    reason: str = ""


def summarize(root: str) -> dict[str, NamespaceSummary]:
    """Count the blocks of each namespace below a root."""
    summaries: dict[str, NamespaceSummary] = {}
    for namespace, entry in blocks_below(root):
        summary = summaries.setdefault(namespace, NamespaceSummary())
        used_ns = entry.found.st_mtime_ns
        summary.oldest_ns = min(summary.oldest_ns or used_ns, used_ns)
        summary.newest_ns = max(summary.newest_ns, used_ns)
        summary.blocks += 1
        summary.disk_bytes += entry.found.st_blocks * _DISK_BLOCK_BYTES
    return summaries


def blocks_below(root: str) -> Iterator[tuple[str, BlockEntry]]:
    """Yield every block file below a root with its namespace."""
    for shard in shards(root):
        for entry in block_entries(shard):
            yield shard.namespace, entry


def verify(entry: BlockEntry) -> Verdict:
    """Read a block file and check all that its footer says."""
    try:
        with Path(entry.path).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_NOREUSE)
            stored = memoryview(file.read())
    except OSError as exc:
        return Verdict(Condition.UNREADABLE, exc.strerror or str(exc))
    footer, payload = stored[-FOOTER_BYTES:], stored[:-FOOTER_BYTES]
    if not payload or footer[: len(MAGIC)] != MAGIC:
        return Verdict(Condition.UNVERIFIABLE if stored else Condition.DAMAGED, "no footer")
    spec = StoreSpec("", (payload.nbytes,), bytes(footer[_IDENTITY]))
    try:
        check_footer(footer, spec, entry.key, payload_checksum([payload]))
    except BlockCorruptError as exc:
        return Verdict(Condition.DAMAGED, str(exc))
    return Verdict(Condition.GOOD)


def unfinished(root: str) -> Iterator[str]:
    """Yield files in preparation whose writers are gone."""
    for namespace in dict.fromkeys(shard.namespace for shard in shards(root)):
        yield from find_orphans(f"{namespace_directory(root, namespace)}/{TEMP_DIRECTORY}")


def foreign(root: str) -> Iterator[str]:
    """Yield regular files that lie among blocks for an hour or more and are none."""
    for shard in shards(root):
        for entry in strays(shard):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _SETTLED_S:
                yield entry.path
