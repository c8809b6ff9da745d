# SPDX-License-Identifier: MIT
"""Identity records: the first one counts, everyone else must agree."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreConfigError, StoreUnavailableError
from ucm.store.identity import check_or_write_identity, record_path

if TYPE_CHECKING:
    from pathlib import Path

RECORD = {"dtype": "bfloat16", "page_tokens": 64, "components": (4096, 4096), "revision": None}


def test_the_first_record_is_written_and_equal_ones_agree(tmp_path: Path) -> None:
    for _ in range(2):
        check_or_write_identity([str(tmp_path)], "swa model", RECORD)
    [path] = (tmp_path / ".ucm" / "identity").iterdir()
    assert json.loads(path.read_text()) == {
        "name": "swa model",
        "record": {**RECORD, "components": [4096, 4096]},
    }


@pytest.mark.parametrize(
    ("field", "ours"), [("dtype", "fp8_e4m3"), ("page_tokens", 128), ("components", (8192,)), ("new", 1)]
)
def test_another_value_is_refused_with_path_field_and_both_values(
    tmp_path: Path, field: str, ours: object
) -> None:
    check_or_write_identity([str(tmp_path)], "swa", RECORD)
    with pytest.raises(StoreConfigError) as refusal:
        check_or_write_identity([str(tmp_path)], "swa", {**RECORD, field: ours})
    message = str(refusal.value)
    stored = json.loads(json.dumps(RECORD.get(field)))
    assert str(record_path(str(tmp_path), "swa")) in message
    assert f"{field} = {stored!r}" in message
    assert repr(json.loads(json.dumps(ours))) in message
    assert "use another storage directory" in message


def test_records_of_other_names_are_no_conflict(tmp_path: Path) -> None:
    check_or_write_identity([str(tmp_path)], "swa model-a", RECORD)
    check_or_write_identity([str(tmp_path)], "swa model-b", {**RECORD, "dtype": "fp8"})


@pytest.mark.parametrize(
    "pair", [("org/a-b", "org-a/b"), ("x" * 300 + "1", "x" * 300 + "2"), ("模型", "模 型")]
)
def test_names_that_look_alike_as_files_stay_apart(tmp_path: Path, pair: tuple[str, str]) -> None:
    for number, name in enumerate(pair):
        check_or_write_identity([str(tmp_path)], name, {"number": number})
    assert len(list((tmp_path / ".ucm" / "identity").iterdir())) == 2


def test_a_root_added_later_gets_the_record_too(tmp_path: Path) -> None:
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    check_or_write_identity(roots[:1], "swa", RECORD)
    check_or_write_identity(roots, "swa", RECORD)
    with pytest.raises(StoreConfigError):
        check_or_write_identity(roots[1:], "swa", {"dtype": "fp8"})


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"name": "swa"}', "null"])
def test_a_damaged_record_is_written_anew(tmp_path: Path, damaged: str) -> None:
    check_or_write_identity([str(tmp_path)], "swa", RECORD)
    record_path(str(tmp_path), "swa").write_text(damaged)
    check_or_write_identity([str(tmp_path)], "swa", RECORD)
    with pytest.raises(StoreConfigError):
        check_or_write_identity([str(tmp_path)], "swa", {"dtype": "fp8"})


def test_of_many_different_first_writers_at_once_one_wins_and_the_others_are_refused(tmp_path: Path) -> None:
    def claim(number: int) -> bool:
        try:
            check_or_write_identity([str(tmp_path)], "swa", {"number": number})
        except StoreConfigError:
            return False
        return True

    with ThreadPoolExecutor(16) as threads:
        accepted = list(threads.map(claim, range(16)))
    assert accepted.count(True) == 1
    assert json.loads(record_path(str(tmp_path), "swa").read_text())["record"] == {
        "number": accepted.index(True)
    }


def test_no_unfinished_file_is_left(tmp_path: Path) -> None:
    check_or_write_identity([str(tmp_path)], "swa", RECORD)
    assert [path.name[0] for path in (tmp_path / ".ucm" / "identity").iterdir()] == ["s"]


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match=f"{tmp_path}/file/.*Not a directory"):
        check_or_write_identity([str(tmp_path / "file")], "swa", RECORD)
