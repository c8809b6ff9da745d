# SPDX-License-Identifier: MIT
"""Walk a storage root: its namespaces, their shards, and the block files in them. Links are not followed."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.posix.layout import SHARD_HEX_DIGITS, is_shard_name, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.interface import BlockKey


class Shard(NamedTuple):
    """A directory that holds blocks of one namespace."""

    namespace: str
    path: str


class BlockEntry(NamedTuple):
    """A file that has the place and the name of a block."""

    key: BlockKey
    path: str
    found: os.stat_result


def namespace_directory(root: str, namespace: str) -> str:
    """Return where a namespace's blocks lie below a root."""
    return f"{root}/{namespace}" if namespace else root


def shards(root: str) -> Iterator[Shard]:
    """Yield every directory that can hold blocks, namespace by namespace; passes over what it cannot list."""
    pending = [""]
    while pending:
        namespace = pending.pop()
        for entry in _entries(namespace_directory(root, namespace)):
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            if is_shard_name(entry.name):
                yield Shard(namespace, entry.path)
            else:
                pending.append(f"{namespace}/{entry.name}" if namespace else entry.name)


def block_entries(shard: Shard) -> Iterator[BlockEntry]:
    """Yield the regular files of a shard that are named like blocks of it."""
    for entry in _entries(shard.path):
        key = _key_in(shard, entry.name)
        if key is None:
            continue
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:  # Gone meanwhile.
            continue
        if stat.S_ISREG(found.st_mode):
            yield BlockEntry(key, entry.path, found)


def strays(shard: Shard) -> Iterator[os.DirEntry[str]]:
    """Yield the regular files of a shard that are not named like blocks of it."""
    for entry in _entries(shard.path):
        if _key_in(shard, entry.name) is None and entry.is_file(follow_symlinks=False):
            yield entry


def _key_in(shard: Shard, name: str) -> BlockKey | None:
    return key_of(name) if shard.path.endswith(f"/{name[:SHARD_HEX_DIGITS]}") else None


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []
