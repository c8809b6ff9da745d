# SPDX-License-Identifier: MIT
"""Which file a block is: `<root>/<namespace>/<3 hex>/<32 hex>`. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ucm.store.errors import StoreConfigError
from ucm.store.interface import KEY_BYTES, BlockKey

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARD_HEX_DIGITS = 3
SHARDS = 16**SHARD_HEX_DIGITS
TEMP_DIRECTORY = ".tmp"

_SHARD_NAME = re.compile(f"[0-9a-f]{{{SHARD_HEX_DIGITS}}}")
_BLOCK_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")


class BlockLayout:
    """The directories of one namespace, and the path of every block in them.

    A block lives below one root only, chosen by its key.

    Attributes:
        roots: The storage roots.
        directories: The namespace's directory below each root, in the roots' order.
    """

    def __init__(self, roots: Sequence[str], namespace: str) -> None:
        for part in namespace.split("/") if namespace else ():
            # A shard's name or a hidden directory would be taken for part of the parent namespace.
            if not part or part.startswith(".") or "\0" in part or _SHARD_NAME.fullmatch(part):
                raise StoreConfigError(f"namespace {namespace!r} is no usable relative directory")
        self.roots = tuple(roots)
        self.directories = tuple(f"{root}/{namespace}" if namespace else root for root in roots)

    def root_index(self, key: BlockKey) -> int:
        """Return which root holds `key`."""
        if len(self.directories) == 1:
            return 0
        # The last bytes: the first ones choose the shard, and both choices should be independent.
        return int.from_bytes(key[-4:], "little") % len(self.directories)

    def path(self, key: BlockKey) -> str:
        """Return the file of `key`."""
        return f"{self.directories[self.root_index(key)]}/{self.name(key)}"

    @staticmethod
    def name(key: BlockKey) -> str:
        """Return the file of `key` below its directory."""
        name = key.hex()
        return f"{name[:SHARD_HEX_DIGITS]}/{name}"

    def temp_path(self, key: BlockKey, writer: str) -> str:
        """Return where `writer` prepares the file of `key` before renaming it into place.

        One directory per namespace and root, so that what dead writers left is found without
        walking the shards.
        """
        return f"{self.directories[self.root_index(key)]}/{TEMP_DIRECTORY}/{key.hex()}.{writer}"


def is_shard_name(name: str) -> bool:
    """Tell whether a directory below the namespace holds blocks."""
    return _SHARD_NAME.fullmatch(name) is not None


def key_of(name: str) -> BlockKey | None:
    """Return the key of a file in a shard directory; None for a file that is no block."""
    return BlockKey(bytes.fromhex(name)) if _BLOCK_NAME.fullmatch(name) else None
