# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from benchmarks.remote import REPOSITORY, RemoteContestant, RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIDE = """
import sys
from benchmarks.remote import serve

class Side:
    def __init__(self):
        self.finished = []

    def timed(self, phase, round_number):
        print("noise")
        if phase == "fail":
            raise AssertionError("wrong bytes")
        return 0.25

    def finish(self, round_number):
        self.finished.append(round_number)

    def rounds(self, first, last):
        return {"first": first, "last": last, "finished": self.finished}

serve(Side(), int(sys.argv[2]))
"""


@pytest.fixture
def side(tmp_path: Path) -> Iterator[RemoteContestant]:
    (tmp_path / "side_module.py").write_text(SIDE)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    contestant = RemoteContestant("it", "side_module", ["argument"], os.environ | {"PYTHONPATH": path})
    with closing(contestant):
        yield contestant


def test_the_other_process_takes_the_time_and_what_it_prints_does_no_harm(side: RemoteContestant) -> None:
    assert side.timed("set", 1) == 0.25
    assert side.timed("get", 1) == 0.25


def test_arguments_and_results_are_values_of_json(side: RemoteContestant) -> None:
    side.finish(3)
    assert side.call("rounds", 1, [2, None]) == {"first": 1, "last": [2, None], "finished": [3]}


def test_a_failure_is_told_with_the_name_and_the_last_line(side: RemoteContestant) -> None:
    with pytest.raises(RemoteError, match=r"^it: AssertionError: wrong bytes$") as caught:
        side.timed("fail", 0)
    assert caught.value.contestant == "it"
    with pytest.raises(RemoteError, match="wrong bytes"):
        side.timed("set", 1)


def test_closing_ends_the_process(side: RemoteContestant) -> None:
    side.finish(0)
    side.close()
    with pytest.raises(ProcessLookupError):
        os.kill(side.pid, 0)
