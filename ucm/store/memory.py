# SPDX-License-Identifier: MIT
"""MemoryStore: the contract in its shortest form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.store.counters import StoreCounters
from ucm.store.errors import BlockCorruptError, StoreUnavailableError
from ucm.store.interface import Block, BlockKey, BlockStatus, KVStore, StoreSpec, StoreStats, check_blocks
from ucm.store.posix.block_file import FOOTER_BYTES, decode_block, encode_block, file_bytes, is_footer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence


class MemoryStore(KVStore):
    """Keeps blocks in a dictionary, each in the form it would have in a file.

    Args:
        spec: What the store holds.
        stored: Where it is kept; may be shared by stores of one namespace.
    """

    def __init__(self, spec: StoreSpec, stored: MutableMapping[BlockKey, bytes] | None = None) -> None:
        self.spec = spec
        self._stored = {} if stored is None else stored
        self._counters = StoreCounters(spec.block_bytes)
        self._closed = False

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._require_open()
        found = [self._is_stored(key) for key in keys]
        self._counters.looked_up(found)
        return found

    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        self._require_open()
        check_blocks(self.spec, blocks, writable=True)
        statuses = [self._load_one(block) for block in blocks]
        self._counters.loaded(statuses)
        return statuses

    def dump(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        self._require_open()
        check_blocks(self.spec, blocks, writable=False)
        written = 0
        for block in blocks:
            if not self._is_stored(block.key):
                self._stored[block.key] = encode_block(self.spec, block.key, block.segments)
                written += 1
        self._counters.dumped(written, failed=0)
        return [BlockStatus.DONE] * len(blocks)

    def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._require_open()
        return [self._stored.pop(key, None) is not None for key in keys]

    def scan(self) -> Iterator[BlockKey]:
        self._require_open()
        return iter([key for key in self._stored if self._is_ours(key)])

    def stats(self) -> StoreStats:
        return self._counters.snapshot()

    def close(self) -> None:
        self._closed = True

    def _is_stored(self, key: BlockKey) -> bool:
        return len(self._stored.get(key, b"")) == file_bytes(self.spec)

    def _is_ours(self, key: BlockKey) -> bool:
        return self._is_stored(key) and is_footer_of(self._stored[key][-FOOTER_BYTES:], self.spec, key)

    def _load_one(self, block: Block) -> BlockStatus:
        stored = self._stored.get(block.key)
        if stored is None:
            return BlockStatus.MISSING
        try:
            payload = decode_block(stored, self.spec, block.key)
        except BlockCorruptError:
            self._stored.pop(block.key, None)
            return BlockStatus.CORRUPT
        start = 0
        for segment in block.segments:
            segment.cast("B")[:] = payload[start : start + segment.nbytes]
            start += segment.nbytes
        if block.publish is not None:
            block.publish()
        return BlockStatus.DONE

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the store is closed")
