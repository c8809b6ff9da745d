# SPDX-License-Identifier: MIT
"""Calls of one store or several, run as one batch of the engine with one deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ucm.store.posix.lease import LeaseRevokedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.posix.blocks import Verdict
    from ucm.store.posix.engine import IoEngine, Urgency, Work
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.lease import HostLease

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[V]):
    """One store's part of a batch.

    Args:
        engine: The same for all calls of a batch.
        count: Number of items.
        work: Handles one of them, in a worker.
        attempt: Does the same at once in the caller's thread, or returns None; None for a
            call that has to wait in any case.
        urgency: The order among batches.
        timeout_s: How long the caller waits.
        moved_bytes: How much the call moves.
        finish: Turns the verdicts, None where there is none in time, into the call's result.
    """

    engine: IoEngine
    count: int
    work: Work[Verdict]
    attempt: Work[Verdict | None] | None = None
    urgency: Urgency
    timeout_s: float
    moved_bytes: int = 0
    finish: Callable[[Sequence[Verdict | None]], V]

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
            moved_bytes=self.moved_bytes,
            attempt=self.attempt,
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
    items = [(call, index) for call in calls for index in range(call.count)]

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
            return None if call.attempt is None else call.attempt(index, scratch, lease)
        except Exception as exc:  # As above.
            return exc

    outcomes = calls[0].engine.run(
        work,
        len(items),
        urgency=min(call.urgency for call in calls),
        timeout_s=since + min(call.timeout_s for call in calls) - time.monotonic(),
        moved_bytes=sum(call.moved_bytes for call in calls),
        attempt=attempt if any(call.attempt for call in calls) else None,
    )
    results: list[V | Exception] = []
    first = 0
    for call in calls:
        result: V | Exception = _result(call, outcomes[first : first + call.count])
        results.append(result)
        first += call.count
    return results


def _result(call: Call[V], outcomes: Sequence[Verdict | Exception | None]) -> V | Exception:
    verdicts: list[Verdict | None] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            return outcome
        verdicts.append(outcome)
    return call.finish(verdicts)
