# SPDX-License-Identifier: MIT
"""Files of dead writers go, those of live ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from ucm.store.posix.writer import new_writer_name, remove_orphans

if TYPE_CHECKING:
    from pathlib import Path

KEY = "00112233445566778899aabbccddeeff"


def leave_file(directory: Path, writer: str, age_s: float = 0.0) -> Path:
    path = directory / f"{KEY}.{writer}"
    path.write_bytes(b"half a block")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def name_of_dead_writer() -> str:
    code = "from ucm.store.posix.writer import new_writer_name; print(new_writer_name())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 -- our own code.
    return done.stdout.strip()


def test_no_two_names_are_equal() -> None:
    assert len({new_writer_name() for _ in range(1000)} | {name_of_dead_writer()}) == 1001


def test_the_file_of_a_dead_process_is_removed_at_once(tmp_path: Path) -> None:
    orphan = leave_file(tmp_path, name_of_dead_writer())
    assert remove_orphans(str(tmp_path)) == 1
    assert not orphan.exists()


def test_the_file_of_a_live_process_stays_however_old(tmp_path: Path) -> None:
    live = leave_file(tmp_path, new_writer_name(), age_s=1e6)
    assert remove_orphans(str(tmp_path)) == 0
    assert live.exists()


def test_a_file_from_another_machine_stays_for_an_hour(tmp_path: Path) -> None:
    # Its process id means nothing here, dead or alive.
    young = leave_file(tmp_path, f"elsewhere-{os.getpid()}-aa-1", age_s=3000)
    old = leave_file(tmp_path, f"elsewhere-{os.getpid()}-aa-2", age_s=4000)
    assert remove_orphans(str(tmp_path)) == 1
    assert young.exists()
    assert not old.exists()


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_wrong_clock_costs_no_live_writer_its_file_and_keeps_no_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    young = leave_file(tmp_path, f"elsewhere-{os.getpid()}-aa-1", age_s=3000)
    old = leave_file(tmp_path, f"elsewhere-{os.getpid()}-aa-2", age_s=4000)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    assert remove_orphans(str(tmp_path)) == 1
    assert young.exists()
    assert not old.exists()


def test_a_file_of_any_other_name_stays_for_an_hour(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    assert remove_orphans(str(tmp_path)) == 0


def test_a_missing_directory_has_no_orphans(tmp_path: Path) -> None:
    assert remove_orphans(str(tmp_path / "absent")) == 0
