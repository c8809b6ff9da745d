# SPDX-License-Identifier: MIT
"""The contract between the SGLang integration and any store."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NewType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BlockKey = NewType("BlockKey", bytes)
"""The 16-byte name of a block, unique within its namespace."""

KEY_BYTES = 16


class BlockStatus(enum.Enum):
    """The verdict on one block."""

    DONE = "done"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class Block(NamedTuple):
    """A key and the host memory it is read from or written into.

    The caller owns the memory and keeps it alive and unchanged until the call that got the block returns.

    Args:
        key: Its name.
        segments: Contiguous byte views in storage order; their lengths equal the `segment_bytes`
            of the store's spec.
        publish: Called when a load has completed and verified the segments, before the block counts as
            `DONE`; by the thread that loaded it, perhaps twice, and never after the call that got the
            block has returned. A block that came too late may have been published and not count as `DONE`.
            It must not wait for anything.
    """

    key: BlockKey
    segments: Sequence[memoryview]
    publish: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """What one store holds: blocks of one shape, for one pool.

    Args:
        namespace: Relative directory below each storage root; "" is the root itself.
        segment_bytes: Length of each segment of a block, in order; all positive.
        identity: 16-byte digest of everything that must match before two
            processes may share bytes. A stored block of another identity is
            never loaded.

    Attributes:
        block_bytes: Sum of the segments: what a block's payload takes in storage.
    """

    namespace: str
    segment_bytes: tuple[int, ...]
    identity: bytes
    block_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.segment_bytes or min(self.segment_bytes) <= 0:
            raise ValueError(f"segment sizes must be positive, got {self.segment_bytes}")
        if len(self.identity) != KEY_BYTES:
            raise ValueError(f"identity must be {KEY_BYTES} bytes, got {len(self.identity)}")
        object.__setattr__(self, "block_bytes", sum(self.segment_bytes))


def check_blocks(spec: StoreSpec, blocks: Sequence[Block], *, writable: bool) -> None:
    """Refuse blocks that do not have the shape of `spec`, before any memory is touched.

    Raises:
        ValueError: A key or segment has a wrong length, or a segment cannot be written.
    """
    for block in blocks:
        sizes = tuple([segment.nbytes for segment in block.segments])
        if sizes != spec.segment_bytes or len(block.key) != KEY_BYTES:
            raise ValueError(
                f"block {block.key.hex()} has segments of {sizes} bytes, expected {spec.segment_bytes}"
            )
        if writable and any(segment.readonly for segment in block.segments):
            raise ValueError(f"block {block.key.hex()} has a read-only segment")


@dataclass(slots=True)
class StoreStats:
    """Counters since the store was opened; blocks unless the name says bytes."""

    loaded: int = 0
    loaded_bytes: int = 0
    loaded_unverified: int = 0  # Of `loaded`: had no checksum and no identity.
    load_missing: int = 0
    load_corrupt: int = 0
    load_failed: int = 0
    dumped: int = 0  # Written; blocks that were stored already do not count.
    dumped_bytes: int = 0
    dump_failed: int = 0
    lookup_hit: int = 0
    lookup_missing: int = 0
    deadlines_missed: int = 0  # Batches that returned without all their verdicts.
    evicted: int = 0  # By this process, to keep below a capacity.
    evicted_bytes: int = 0  # What these took in storage.


class KVStore(ABC):
    """Blocks of one namespace, all of one shape.

    Every method may be called from any thread. Each batch call returns exactly
    one verdict per entry, in order; one bad block never costs its neighbours.
    Batch calls return within the store's deadline, and once they have returned
    nothing touches the segments nor publishes a block any more. They raise `StoreUnavailableError`
    only when the whole store is unusable, and `ValueError` for blocks that are
    not of the store's shape.
    """

    spec: StoreSpec
    evicts = False
    """Blocks that are not used may be evicted; see `touch`."""

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tell for each key whether a block of the right size is stored."""

    @abstractmethod
    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        """Read blocks into their segments.

        A status other than `DONE` leaves the segments in an unspecified state.
        """

    @abstractmethod
    def dump(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        """Store blocks; a key that is stored already counts as `DONE`."""

    @abstractmethod
    def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Remove blocks; True where one was removed, absent keys are no error."""

    @abstractmethod
    def scan(self) -> Iterator[BlockKey]:
        """Yield the keys of stored blocks of this spec's identity, in no order."""

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 -- most stores have no use for it.
        """Count blocks as used just now, where blocks that are not used get evicted; keys may be absent."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return a snapshot of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Release everything within seconds; calling it again does nothing."""
