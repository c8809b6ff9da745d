# SPDX-License-Identifier: MIT
"""What can be asked of an EngineStore: verdicts come in, an answer goes out, counted and with a warning."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ucm.store.interface import BlockStatus
from ucm.store.posix.blocks import DONE, MISSING, STORED_ALREADY, UNVERIFIED, Verdict
from ucm.store.posix.call import Call
from ucm.store.posix.engine import Urgency
from ucm.store.posix.pieces import LargeBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.interface import Block, BlockKey
    from ucm.store.posix.engine_store import EngineStore
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.lease import HostLease

logger = logging.getLogger(__name__)

_LOSSES = (BlockStatus.CORRUPT, BlockStatus.FAILED)

V = TypeVar("V")
LoadVerdict = TypeVar("LoadVerdict", bound=Verdict | None)


class _Operation(Call[V]):
    """A call on blocks of one store."""

    __slots__ = ("store",)

    name: ClassVar[str]
    store: EngineStore

    def key(self, index: int) -> BlockKey:
        """Return which block an item is about."""
        raise NotImplementedError

    def judge(self, verdicts: list[Verdict | None]) -> list[Verdict]:
        """Replace verdicts that did not come in time, and tell what was lost."""
        judged = [verdict for verdict in verdicts if verdict is not None]
        if len(judged) < len(verdicts):
            self.store.counters.missed_deadline()
            late = Verdict(BlockStatus.FAILED, f"no answer within {self.timeout_s:g} s")
            judged = [late if verdict is None else verdict for verdict in verdicts]
        lost = [index for index, verdict in enumerate(judged) if verdict.status in _LOSSES]
        if lost:
            self._warn_of_losses(judged, lost[0])
        return judged

    def _warn_of_losses(self, verdicts: Sequence[Verdict], first: int) -> None:
        statuses = [verdict.status for verdict in verdicts]
        logger.warning(
            "%s %s: %d of %d blocks, %d missing, %d corrupt, %d failed; first %s: %s",
            self.name,
            self.store.label,
            statuses.count(BlockStatus.DONE),
            len(statuses),
            statuses.count(BlockStatus.MISSING),
            statuses.count(BlockStatus.CORRUPT),
            statuses.count(BlockStatus.FAILED),
            self.store.files.where(self.key(first)),
            verdicts[first].reason,
        )


class _OnKeys(_Operation[list[bool]]):
    __slots__ = ("keys",)

    def __init__(
        self, store: EngineStore, keys: Sequence[BlockKey], timeout_s: float, *, can_attempt: bool
    ) -> None:
        super().__init__(store.engine, len(keys), timeout_s, can_attempt=can_attempt)
        self.store = store
        self.keys = keys

    def key(self, index: int) -> BlockKey:
        return self.keys[index]

    def finish(self, verdicts: list[Verdict | None]) -> list[bool]:
        if verdicts.count(DONE) == len(verdicts):
            return [True] * len(verdicts)
        return [verdict.status is BlockStatus.DONE for verdict in self.judge(verdicts)]


class Lookup(_OnKeys):
    """Which blocks are stored."""

    __slots__ = ("asked", "since", "whole")

    name = "lookup"
    urgency = Urgency.READ

    def __init__(self, store: EngineStore, keys: Sequence[BlockKey]) -> None:
        self.since = time.monotonic()
        self.whole = keys
        # The others are known to be there; `keys` are those at these places.
        self.asked = store.known.to_ask(keys)
        if len(self.asked) < len(keys):
            keys = [keys[index] for index in self.asked]
        super().__init__(store, keys, store.config.lookup_timeout_s, can_attempt=store.files.can_read_now)

    def work(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict:
        del scratch, lease
        return self.store.files.look(self.keys[index])

    def attempt(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict | None:
        del scratch, lease
        return self.store.files.look_now(self.keys[index])

    def finish(self, verdicts: list[Verdict | None]) -> list[bool]:
        known = self.store.known
        found = super().finish(verdicts)
        # What did not answer may still be there.
        if any(verdict == MISSING and key in known for key, verdict in zip(self.keys, verdicts, strict=True)):
            known.clear()
            if len(self.keys) < len(self.whole):
                return Lookup(self.store, self.whole).run(self.since)
        if len(self.keys) < len(self.whole):
            answers = [True] * len(self.whole)
            for index, there in zip(self.asked, found, strict=True):
                answers[index] = there
            found = answers
        known.add(key for key, there in zip(self.whole, found, strict=True) if there)
        self.store.counters.looked_up(found)
        return found


class Delete(_OnKeys):
    """Remove blocks; True where one was removed."""

    __slots__ = ()

    name = "delete"
    urgency = Urgency.WRITE

    def __init__(self, store: EngineStore, keys: Sequence[BlockKey]) -> None:
        super().__init__(store, keys, store.config.dump_timeout_s, can_attempt=False)

    def work(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict:
        del scratch, lease
        return self.store.files.delete(self.keys[index])

    def finish(self, verdicts: list[Verdict | None]) -> list[bool]:
        self.store.known.discard(self.keys)
        return super().finish(verdicts)


class _OnBlocks(_Operation[list[BlockStatus]]):
    __slots__ = ("blocks",)

    def __init__(
        self, store: EngineStore, blocks: Sequence[Block], timeout_s: float, *, can_attempt: bool
    ) -> None:
        super().__init__(
            store.engine, len(blocks), timeout_s, can_attempt=can_attempt, item_bytes=store.spec.block_bytes
        )
        self.store = store
        self.blocks = blocks

    def key(self, index: int) -> BlockKey:
        return self.blocks[index].key

    def keys_with(self, wanted: V, outcomes: Sequence[V]) -> list[BlockKey]:
        """Return the keys of the blocks with one of the outcomes."""
        return [block.key for block, outcome in zip(self.blocks, outcomes, strict=True) if outcome == wanted]


class Load(_OnBlocks):
    """Read blocks into their segments."""

    __slots__ = ()

    name = "load"
    urgency = Urgency.READ

    def __init__(self, store: EngineStore, blocks: Sequence[Block]) -> None:
        super().__init__(store, blocks, store.config.load_timeout_s, can_attempt=store.files.can_read_now)

    def work(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict:
        block = self.blocks[index]
        return _published(block, self.store.files.load(block, scratch, lease), lease)

    def attempt(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict | None:
        block = self.blocks[index]
        return _published(block, self.store.files.load_now(block, scratch, lease), lease)

    def finish(self, verdicts: list[Verdict | None]) -> list[BlockStatus]:
        if verdicts.count(DONE) == len(verdicts):
            statuses, unverified = [BlockStatus.DONE] * len(verdicts), 0
        else:
            judged = self.judge(verdicts)
            statuses, unverified = [verdict.status for verdict in judged], judged.count(UNVERIFIED)
            self._forget_what_is_gone(statuses)
        self.store.counters.loaded(statuses, unverified)
        if self.store.uses:
            self.store.uses.used(self.keys_with(BlockStatus.DONE, statuses))
        return statuses

    def _forget_what_is_gone(self, statuses: Sequence[BlockStatus]) -> None:
        known = self.store.known
        if any(key in known for key in self.keys_with(BlockStatus.MISSING, statuses)):
            known.clear()
        known.discard(self.keys_with(BlockStatus.CORRUPT, statuses))


class LoadInPieces(Load):
    """Read few large blocks, with several threads each."""

    __slots__ = ("large", "pieces")

    def __init__(self, store: EngineStore, blocks: Sequence[Block], pieces: int) -> None:
        super().__init__(store, blocks)
        self.pieces = pieces
        self.large = [LargeBlock(store.spec, block, store.files, pieces) for block in blocks]
        self.count *= pieces
        self.item_bytes //= pieces

    def work(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict:
        block, piece = divmod(index, self.pieces)
        return _published(self.blocks[block], self.large[block].load(piece, scratch, lease), lease)

    def attempt(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict | None:
        block, piece = divmod(index, self.pieces)
        return _published(self.blocks[block], self.large[block].load_now(piece, scratch, lease), lease)

    def finish(self, verdicts: list[Verdict | None]) -> list[BlockStatus]:
        starts = range(0, self.count, self.pieces)
        return super().finish([_of_whole(verdicts[start : start + self.pieces]) for start in starts])


def _published(block: Block, verdict: LoadVerdict, lease: HostLease) -> LoadVerdict:
    """Publish a block that has just been loaded, if its verdict says that it has."""
    if (
        block.publish is not None
        and verdict is not None
        and verdict.status is BlockStatus.DONE
        and verdict is not LargeBlock.UNDER_WAY
    ):
        with lease:
            block.publish()
    return verdict


def _of_whole(pieces: Sequence[Verdict | None]) -> Verdict | None:
    """Return the verdict on a block: the one of the last piece, if all are there."""
    if None in pieces:
        return None
    (verdict,) = (piece for piece in pieces if piece is not LargeBlock.UNDER_WAY)
    return verdict


class Dump(_OnBlocks):
    """Store blocks, unless they are stored already."""

    __slots__ = ()

    name = "dump"
    urgency = Urgency.WRITE

    def __init__(self, store: EngineStore, blocks: Sequence[Block]) -> None:
        super().__init__(store, blocks, store.config.dump_timeout_s, can_attempt=store.files.can_write_now)

    def work(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict:
        del scratch
        return self.store.files.dump(self.blocks[index], lease)

    def attempt(self, index: int, scratch: Scratch, lease: HostLease) -> Verdict | None:
        del scratch
        return self.store.files.dump_now(self.blocks[index], lease)

    def finish(self, verdicts: list[Verdict | None]) -> list[BlockStatus]:
        if verdicts.count(DONE) == len(verdicts):
            keys = [block.key for block in self.blocks]
            self.store.counters.dumped(len(keys), 0)
            self.store.known.add(keys)
            if self.store.uses:
                self.store.uses.written(keys)
            return [BlockStatus.DONE] * len(keys)
        judged = self.judge(verdicts)
        statuses = [verdict.status for verdict in judged]
        self.store.counters.dumped(judged.count(DONE), statuses.count(BlockStatus.FAILED))
        self.store.known.add(self.keys_with(BlockStatus.DONE, statuses))
        if self.store.uses:
            self.store.uses.written(self.keys_with(DONE, judged))
            self.store.uses.used(self.keys_with(STORED_ALREADY, judged))
        return statuses
