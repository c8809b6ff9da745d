# SPDX-License-Identifier: MIT
"""What lies in a storage directory, pool by pool."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ucm.store.posix.block_file import FOOTER_BYTES
from ucm.store.posix.layout import is_shard_name, key_of
from ucm.validation.results import PoolUsage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NAMESPACE = re.compile(r"(?P<pool>.+)_(?P<component_bytes>\d+)x(?P<components>\d+)")
SIDECARS = "sglang_v2"
PRIMARY = "kv"


class StorageDirectory:
    """The storage roots of an embedded PosixStore, seen from outside; nothing is written."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)

    def pools(self) -> tuple[PoolUsage, ...]:
        """Count the blocks of every pool: the primary KV first, sidecars by name."""
        primary = Counter(block.stat().st_size - FOOTER_BYTES for block in self._primary_blocks())
        sidecars = Counter(namespace.name for namespace in self._namespaces() for _ in _blocks(namespace))
        return tuple(
            [
                PoolUsage(name=PRIMARY, namespace="", page_bytes=size, pages=pages, bytes=size * pages)
                for size, pages in sorted(primary.items())
            ]
            + [_sidecar_usage(name, pages) for name, pages in sorted(sidecars.items())]
        )

    def pages(self) -> dict[str, int]:
        """Return the number of blocks by namespace; "" is the primary KV."""
        pages = Counter("" for _ in self._primary_blocks())
        for namespace in self._namespaces():
            pages[f"{SIDECARS}/{namespace.name}"] += sum(1 for _ in _blocks(namespace))
        return dict(pages)

    def blocks(self, namespace: str) -> list[Path]:
        """Return the block files of a namespace; "" is the primary KV."""
        if not namespace:
            return list(self._primary_blocks())
        return [block for root in self.roots for block in _blocks(root / namespace)]

    def _primary_blocks(self) -> Iterator[Path]:
        for root in self.roots:
            yield from _blocks(root)

    def _namespaces(self) -> Iterator[Path]:
        for root in self.roots:
            if (root / SIDECARS).is_dir():
                yield from (entry for entry in (root / SIDECARS).iterdir() if entry.is_dir())


def _blocks(namespace: Path) -> Iterator[Path]:
    """Yield the block files below the shard directories of one namespace."""
    if not namespace.is_dir():
        return
    for shard in namespace.iterdir():
        if is_shard_name(shard.name):
            yield from (path for path in shard.iterdir() if key_of(path.name))


def _sidecar_usage(directory: str, pages: int) -> PoolUsage:
    match = _NAMESPACE.fullmatch(directory)
    name = match["pool"] if match else directory
    page_bytes = int(match["component_bytes"]) * int(match["components"]) if match else 0
    return PoolUsage(
        name=name,
        namespace=f"{SIDECARS}/{directory}",
        page_bytes=page_bytes,
        pages=pages,
        bytes=pages * page_bytes,
    )
