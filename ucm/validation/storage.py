# SPDX-License-Identifier: MIT
"""What lies in a storage directory, pool by pool."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING

from ucm.store.posix.block_file import FOOTER_BYTES, MAGIC
from ucm.store.posix.layout import is_shard_name, key_of
from ucm.validation.results import PoolUsage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NAMESPACE = re.compile(r"sglang_v2/(?P<pool>.+)_(?P<component_bytes>\d+)x(?P<components>\d+)")
SIDECARS = "sglang_v2"
PRIMARY = "kv"


class StorageDirectory:
    """The storage roots of an embedded PosixStore, seen from outside; nothing is written."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)

    def pools(self) -> tuple[PoolUsage, ...]:
        """Count the blocks of every pool: the primary KV first, sidecars by name."""
        blocks = self.blocks()
        sizes = Counter(filter(None, map(_payload_bytes, blocks.pop("", []))))
        primary = [
            PoolUsage(name=PRIMARY, namespace="", page_bytes=size, pages=pages, bytes=size * pages)
            for size, pages in sorted(sizes.items())
        ]
        return (*primary, *(_sidecar_usage(name, len(files)) for name, files in sorted(blocks.items())))

    def blocks(self) -> dict[str, list[Path]]:
        """Return the block files by namespace; "" is the primary KV."""
        blocks: dict[str, list[Path]] = {}
        for root in self.roots:
            for namespace in ("", *_sidecar_namespaces(root)):
                blocks.setdefault(namespace, []).extend(_blocks(root / namespace))
        return {namespace: files for namespace, files in blocks.items() if files}

    def pages(self) -> dict[str, int]:
        """Return the number of blocks by namespace; "" is the primary KV."""
        return {namespace: len(files) for namespace, files in self.blocks().items()}


def _sidecar_namespaces(root: Path) -> list[str]:
    if not (root / SIDECARS).is_dir():
        return []
    return [f"{SIDECARS}/{entry.name}" for entry in (root / SIDECARS).iterdir() if entry.is_dir()]


def _blocks(namespace: Path) -> Iterator[Path]:
    """Yield the block files of one namespace."""
    if not namespace.is_dir():
        return
    for shard in namespace.iterdir():
        if is_shard_name(shard.name):
            yield from (block for block in shard.iterdir() if key_of(block.name))


def _payload_bytes(block: Path) -> int:
    """Return the size of a block without its footer, if it has one; 0 if somebody has just removed it."""
    try:
        with block.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - FOOTER_BYTES))
            return size - FOOTER_BYTES if file.read(len(MAGIC)) == MAGIC else size
    except FileNotFoundError:
        return 0


def pool_name(namespace: str) -> str:
    """Return the pool that a namespace belongs to."""
    match = _NAMESPACE.fullmatch(namespace)
    return match["pool"] if match else namespace or PRIMARY


def _sidecar_usage(namespace: str, pages: int) -> PoolUsage:
    match = _NAMESPACE.fullmatch(namespace)
    page_bytes = int(match["component_bytes"]) * int(match["components"]) if match else 0
    return PoolUsage(
        name=pool_name(namespace),
        namespace=namespace,
        page_bytes=page_bytes,
        pages=pages,
        bytes=pages * page_bytes,
    )
