# SPDX-License-Identifier: MIT
"""Run two contestants in turns and keep the times of each turn.

A shared machine drifts: what ran at a quiet moment looks fast. So both contestants do every piece of work
right after each other, and the ratio is taken within each pair. Who goes first finds the processor's caches
full of something else and may be two times as slow on a short call; so a pair is two turns, A B and B A.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_PAIRS = 7
MOST_PAIRS = 31


class Contestant(ABC):
    """One side of a comparison.

    `round_number` grows from 0; what one round leaves behind must not help a later one.
    """

    name: str

    @abstractmethod
    def timed(self, phase: str, round_number: int) -> float:
        """Do one phase of one round and return the seconds that the work took, without its checks.

        Raises:
            AssertionError: The work was not done right.
        """

    def finish(self, round_number: int) -> None:  # noqa: B027 (most have nothing to tidy up)
        """Tidy up after the last phase of a round."""


class LocalContestant(Contestant):
    """A contestant whose work is one call in this thread."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def timed(self, phase: str, round_number: int) -> float:
        """Time `run` alone."""
        self.prepare(phase, round_number)
        started = self.clock()
        result = self.run(phase, round_number)
        seconds = self.clock() - started
        self.check(phase, round_number, result)
        return seconds

    def prepare(self, phase: str, round_number: int) -> None:
        """Get ready for one phase of one round."""

    @abstractmethod
    def run(self, phase: str, round_number: int) -> object:
        """Do the work of one phase."""

    @abstractmethod
    def check(self, phase: str, round_number: int, result: object) -> None:
        """Raise `AssertionError` unless the work was done right."""


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Seconds of both contestants, one entry per pair (the mean of its two turns), in the order they ran."""

    ours_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)

    @property
    def speedups(self) -> list[float]:
        """How many times as fast ours was, pair by pair."""
        return [other / ours for ours, other in zip(self.ours_s, self.other_s, strict=True)]

    @property
    def speedup(self) -> float:
        """The median of `speedups`."""
        return statistics.median(self.speedups)


def run_pairs(
    ours: Contestant, other: Contestant, phases: Sequence[str], *, budget_s: float
) -> dict[str, PairedTimes]:
    """Time every phase on both contestants in turns, after one pair to warm up.

    At least `LEAST_PAIRS` pairs are measured however long they take, then more until `budget_s` is spent or
    there are `MOST_PAIRS`.
    """
    times = {phase: PairedTimes() for phase in phases}
    started = time.perf_counter()
    for pair in range(-1, MOST_PAIRS):
        if pair >= LEAST_PAIRS and time.perf_counter() - started > budget_s:
            break
        first = _turn((ours, other), phases, 2 * pair + 2)
        second = _turn((other, ours), phases, 2 * pair + 3)
        if pair >= 0:
            for phase in phases:
                times[phase].ours_s.append((first[ours, phase] + second[ours, phase]) / 2)
                times[phase].other_s.append((first[other, phase] + second[other, phase]) / 2)
    return times


def expect(found: object, expected: object, what: str) -> None:
    """Raise `AssertionError` unless both are equal."""
    if found != expected:
        raise AssertionError(f"{what}: {found} instead of {expected}")


def _turn(
    order: tuple[Contestant, Contestant], phases: Sequence[str], round_number: int
) -> dict[tuple[Contestant, str], float]:
    seconds = {
        (contestant, phase): contestant.timed(phase, round_number) for phase in phases for contestant in order
    }
    for contestant in order:
        contestant.finish(round_number)
    return seconds
