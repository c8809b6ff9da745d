# SPDX-License-Identifier: MIT
"""Calls of one store or several, run as one batch of the engine with one deadline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from ucm.store.posix.lease import LeaseRevokedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.posix.blocks import Verdict
    from ucm.store.posix.engine import IoEngine, Urgency
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.lease import HostLease

V = TypeVar("V")


class Call(ABC, Generic[V]):
    """One store's part of a batch.

    Attributes:
        urgency: The order among batches.
        engine: The same for all calls of a batch.
        count: Number of items.
        timeout_s: How long the caller waits.
        item_bytes: How much one item moves.
        can_attempt: Whether `attempt` ever does anything.
    """

    __slots__ = ("can_attempt", "count", "engine", "item_bytes", "timeout_s")

    urgency: ClassVar[Urgency]

    def __init__(
        self,
        engine: IoEngine,
        count: int,
        timeout_s: float,
        *,
        can_attempt: bool = False,
        item_bytes: int = 0,
    ) -> None:
        self.engine = engine
        self.count = count
        self.timeout_s = timeout_s
        self.can_attempt = can_attempt
        self.item_bytes = item_bytes

    @abstractmethod
    def work(self, index: int, scratch: Scratch, lease: HostLease, /) -> Verdict:
        """Handle one item, in a worker."""

    def attempt(self, index: int, scratch: Scratch, lease: HostLease, /) -> Verdict | None:
        """Do the same at once in the caller's thread, or return None if it has to wait."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, verdicts: list[Verdict | None]) -> V:
        """Turn the verdicts, None where there is none in time, into the call's result."""

    def run(self, since: float) -> V:
        """Run this call alone; its time began at `since`, on the monotonic clock.

        Raises:
            StoreUnavailableError: The engine is closed, or cannot start its first thread.
        """
        verdicts = self.engine.run(
            self.work,
            self.count,
            urgency=self.urgency,
            timeout_s=since + self.timeout_s - time.monotonic(),
            moved_bytes=self.count * self.item_bytes,
            attempt=self.attempt if self.can_attempt else None,
        )
        return self.finish(verdicts)


def run_calls(calls: Sequence[Call[V]], since: float) -> list[V | Exception]:
    """Run calls together; the shortest timeout among them counts, from `since` on.

    Args:
        calls: Calls of stores on the same engine; at least one.
        since: When the time began to run, on the monotonic clock.

    Returns:
        The result of each call, or the exception that it alone ends with.

    Raises:
        StoreUnavailableError: The engine is closed, or cannot start its first thread.
        Exception: Whatever the only call ends with.
    """
    if len(calls) == 1:
        return [calls[0].run(since)]
    # Large items first: a large one begun last would leave the other threads with nothing to do.
    by_size = sorted(calls, key=lambda call: call.item_bytes, reverse=True)
    items = [(call, index) for call in by_size for index in range(call.count)]

    def work(item: int, scratch: Scratch, lease: HostLease) -> Verdict | Exception:
        call, index = items[item]
        try:
            return call.work(index, scratch, lease)
        except LeaseRevokedError:
            raise
        except Exception as exc:  # A fault of our own; it must not cost the other calls.
            return exc

    def attempt(item: int, scratch: Scratch, lease: HostLease) -> Verdict | Exception | None:
        call, index = items[item]
        try:
            return call.attempt(index, scratch, lease) if call.can_attempt else None
        except Exception as exc:  # As above.
            return exc

    outcomes = calls[0].engine.run(
        work,
        len(items),
        urgency=min(call.urgency for call in calls),
        timeout_s=since + min(call.timeout_s for call in calls) - time.monotonic(),
        moved_bytes=sum(call.count * call.item_bytes for call in calls),
        attempt=attempt if any(call.can_attempt for call in calls) else None,
        parts=[(call.count, call.item_bytes) for call in by_size],
    )
    results: dict[Call[V], V | Exception] = {}
    first = 0
    for call in by_size:
        result: V | Exception = _result(call, outcomes[first : first + call.count])
        results[call] = result
        first += call.count
    return [results[call] for call in calls]


def _result(call: Call[V], outcomes: Sequence[Verdict | Exception | None]) -> V | Exception:
    verdicts: list[Verdict | None] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            return outcome
        verdicts.append(outcome)
    try:
        return call.finish(verdicts)
    except Exception as exc:  # Its own outcome, too.
        return exc
