# SPDX-License-Identifier: MIT
"""Let several pools work together: whatever each asks of its store next goes there in one call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ucm.store.together import dump_together, load_together, lookup_together

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ucm.store.interface import Block, BlockKey, BlockStatus, KVStore

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Result = TypeVar("Result")

Rounds: TypeAlias = "Generator[tuple[KVStore, Sequence[Question]], list[Answer], Result]"
"""One pool's work: yields a store and what to ask it, is sent the answers, returns the result."""
Lookups: TypeAlias = "Rounds[BlockKey, bool, Result]"
Transfers: TypeAlias = "Rounds[Block, BlockStatus, list[BlockStatus]]"


def look_up(pools: Sequence[Lookups[Result]], since: float | None = None) -> list[Result | Exception]:
    """Run lookups together.

    Args:
        pools: One pool's work each.
        since: When the time for all of it began, on the monotonic clock; None for now.

    Returns:
        Each one's result, or the exception that it alone ended with.
    """
    return _run(pools, lookup_together, since)


def load(pools: Sequence[Transfers]) -> list[list[BlockStatus] | Exception]:
    """Run loads together; see `look_up`."""
    return _run(pools, load_together)


def dump(pools: Sequence[Transfers]) -> list[list[BlockStatus] | Exception]:
    """Run dumps together; see `look_up`."""
    return _run(pools, dump_together)


def result_of(outcome: Result | Exception) -> Result:
    """Return a result, or raise what came instead."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _run(
    pools: Sequence[Rounds[Question, Answer, Result]],
    ask: Callable[[Sequence[tuple[KVStore, Sequence[Question]]], float], list[list[Answer] | Exception]],
    since: float | None = None,
) -> list[Result | Exception]:
    since = time.monotonic() if since is None else since
    if len(pools) == 1:  # The usual case, without the bookkeeping.
        return [_run_alone(pools[0], ask, since)]
    results: dict[int, Result | Exception] = {}
    answers: dict[int, list[Answer] | Exception | None] = dict.fromkeys(range(len(pools)))
    while True:
        questions = {}
        for number, answer in answers.items():
            try:
                questions[number] = _proceed(pools[number], answer)
            except StopIteration as end:  # noqa: PERF203 -- each pool ends for itself.
                results[number] = end.value
            except Exception as exc:  # One pool's trouble is no other's.
                results[number] = exc
        if not questions:
            break
        answers = dict(zip(questions, ask(list(questions.values()), since), strict=True))
    return [results[number] for number in range(len(pools))]


def _run_alone(
    pool: Rounds[Question, Answer, Result],
    ask: Callable[[Sequence[tuple[KVStore, Sequence[Question]]], float], list[list[Answer] | Exception]],
    since: float,
) -> Result | Exception:
    answer: list[Answer] | Exception | None = None
    try:
        while True:
            (answer,) = ask([_proceed(pool, answer)], since)
    except StopIteration as end:
        result: Result = end.value
        return result
    except Exception as exc:  # Its own outcome, as among several.
        return exc


def _proceed(
    pool: Rounds[Question, Answer, Result], answer: list[Answer] | Exception | None
) -> tuple[KVStore, Sequence[Question]]:
    if answer is None:
        return next(pool)
    return pool.throw(answer) if isinstance(answer, Exception) else pool.send(answer)
