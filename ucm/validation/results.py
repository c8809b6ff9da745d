# SPDX-License-Identifier: MIT
"""What a validation measured: answers, phases, pools, and the report made of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed, by the tier they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        """Tokens from any tier."""
        return self.device + self.host + self.storage

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(self.device + other.device, self.host + other.host, self.storage + other.storage)


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedily generated tokens and the logprob of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def first_difference(self, other: Answer) -> int | None:
        """Return the position of the first token that differs, None if all are equal."""
        for position, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != theirs:
                return position
        if len(self.tokens) != len(other.tokens):
            return min(len(self.tokens), len(other.tokens))
        return None

    def max_abs_logprob_delta(self, other: Answer) -> float:
        """Return the largest difference of logprobs, up to and including the first token that differs."""
        end = self.first_difference(other)
        compared = len(self.tokens) if end is None else end + 1
        pairs = zip(self.logprobs[:compared], other.logprobs[:compared], strict=False)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One step of the scenario; `problems` is empty if it met its expectation.

    A phase that sends several prompts at once holds their sums, the largest delta and the longest
    time to first token. A phase that computes a reference answer has delta 0 by definition.
    """

    name: str
    prompt_tokens: int
    cached: CachedTokens
    expected: CachedTokens
    max_abs_logprob_delta: float
    ttft_s: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """What one pool has on storage; bytes are payload, without footers."""

    name: str
    namespace: str
    page_bytes: int
    pages: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a validation."""

    model: str
    selection: str
    phases: tuple[Phase, ...]
    pools: tuple[PoolUsage, ...]

    @property
    def ok(self) -> bool:
        """Whether every phase met its expectation."""
        return not any(phase.problems for phase in self.phases)

    @property
    def problems(self) -> list[str]:
        """Every unmet expectation, prefixed with its phase."""
        return [f"{phase.name}: {problem}" for phase in self.phases for problem in phase.problems]

    def document(self) -> dict[str, object]:
        """Return the published form, as `docs/validate.md` describes it."""
        return {
            "ok": self.ok,
            "model": self.model,
            "selection": self.selection,
            "phases": [
                {
                    "name": phase.name,
                    "prompt_tokens": phase.prompt_tokens,
                    "cached": asdict(phase.cached),
                    "expected_storage": phase.expected.storage,
                    "max_abs_logprob_delta": phase.max_abs_logprob_delta,
                    "ttft_s": round(phase.ttft_s, 4),
                }
                for phase in self.phases
            ],
            "pools": [asdict(pool) for pool in self.pools],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A prompt that is stored, with what it must restore and answer after a restart."""

    prompt: tuple[int, ...]
    restorable_tokens: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a later validation needs to go on after a restart of the server.

    `subjects` maps the name of a phase to the prompts it sends at once.
    """

    model: str
    selection: str
    output_tokens: int
    phases: tuple[Phase, ...]
    subjects: dict[str, tuple[Subject, ...]]

    def to_json(self) -> str:
        """Return the text form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Continuation:
        """Read the text form.

        Raises:
            ValueError: The text is not a continuation.
        """
        try:
            document = json.loads(text)
            return cls(
                model=document["model"],
                selection=document["selection"],
                output_tokens=document["output_tokens"],
                phases=tuple(_phase(entry) for entry in document["phases"]),
                subjects={
                    name: tuple(_subject(entry) for entry in entries)
                    for name, entries in document["subjects"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the state of a validation: {error!r}") from error


def save(report: Report, continuation: Continuation, path: Path) -> None:
    """Write the report, and beside it what `load_continuation` reads: `report.json`, `report.state.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.document(), indent=2) + "\n")
    _continuation_path(path).write_text(continuation.to_json())


def load_continuation(report: Path) -> Continuation:
    """Read what a saved report's validation left to go on with.

    Raises:
        OSError: The file beside the report cannot be read.
        ValueError: It is not the state of a validation.
    """
    path = _continuation_path(report)
    try:
        return Continuation.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def sum_cached(entries: Iterable[CachedTokens]) -> CachedTokens:
    """Add up tokens per tier."""
    return sum(entries, CachedTokens())


def _continuation_path(report: Path) -> Path:
    return report.with_suffix(".state.json")


def _phase(entry: dict[str, Any]) -> Phase:
    return Phase(
        **{
            **entry,
            "cached": CachedTokens(**entry["cached"]),
            "expected": CachedTokens(**entry["expected"]),
            "problems": tuple(entry["problems"]),
        }
    )


def _subject(entry: dict[str, Any]) -> Subject:
    answer = entry["answer"]
    return Subject(
        prompt=tuple(entry["prompt"]),
        restorable_tokens=entry["restorable_tokens"],
        answer=Answer(tokens=tuple(answer["tokens"]), logprobs=tuple(answer["logprobs"])),
    )
