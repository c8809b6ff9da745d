# SPDX-License-Identifier: MIT
"""Answers, reports and continuations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ucm.validation.results import (
    Answer,
    CachedTokens,
    Continuation,
    Phase,
    PoolUsage,
    Report,
    Subject,
    load_continuation,
    save,
)

if TYPE_CHECKING:
    from pathlib import Path

PHASE = Phase(
    name="flushed-l3",
    prompt_tokens=298,
    cached=CachedTokens(storage=256),
    expected=CachedTokens(storage=256),
    max_abs_logprob_delta=0.0,
    ttft_s=0.12345,
)
REPORT = Report(
    model="tiny",
    selection="patched",
    phases=(PHASE,),
    pools=(
        PoolUsage(name="mamba", namespace="sglang_v2/mamba_66048x1", page_bytes=66048, pages=2, bytes=132096),
    ),
)
CONTINUATION = Continuation(
    model="tiny",
    selection="patched",
    output_tokens=8,
    phases=(PHASE,),
    subjects={"restart": (Subject(prompt=(1, 2), restorable_tokens=0, answer=Answer((3,), (-0.5,))),)},
)


def test_equal_answers_have_no_difference() -> None:
    answer = Answer((1, 2), (-0.5, -0.25))
    assert answer.first_difference(answer) is None
    assert answer.max_abs_logprob_delta(answer) == 0.0


def test_logprobs_are_compared_up_to_the_first_token_that_differs() -> None:
    reference, other = Answer((1, 2, 3), (-0.5, -0.5, -0.5)), Answer((1, 9, 3), (-0.5, -0.75, -9.0))
    assert reference.first_difference(other) == 1
    assert reference.max_abs_logprob_delta(other) == 0.25


def test_an_answer_that_stops_early_differs() -> None:
    assert Answer((1, 2), (0.0, 0.0)).first_difference(Answer((1,), (0.0,))) == 1


def test_the_report_has_exactly_the_published_fields() -> None:
    assert json.loads(json.dumps(REPORT.document())) == {
        "ok": True,
        "model": "tiny",
        "selection": "patched",
        "phases": [
            {
                "name": "flushed-l3",
                "prompt_tokens": 298,
                "cached": {"device": 0, "host": 0, "storage": 256},
                "expected_storage": 256,
                "max_abs_logprob_delta": 0.0,
                "ttft_s": 0.1235,
            }
        ],
        "pools": [
            {
                "name": "mamba",
                "namespace": "sglang_v2/mamba_66048x1",
                "page_bytes": 66048,
                "pages": 2,
                "bytes": 132096,
            }
        ],
    }


def test_a_saved_validation_can_be_continued(tmp_path: Path) -> None:
    save(REPORT, CONTINUATION, tmp_path / "new" / "report.json")
    assert load_continuation(tmp_path / "new" / "report.json") == CONTINUATION


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}'])
def test_a_damaged_continuation_is_refused_with_its_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.state.json").write_text(text)
    with pytest.raises(ValueError, match=r"report\.state\.json"):
        load_continuation(tmp_path / "report.json")
