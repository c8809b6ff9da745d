# SPDX-License-Identifier: MIT
from __future__ import annotations

import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.backends import OURS
from benchmarks.page_sets import LIMIT_PHASES, PAGE_SETS
from benchmarks.processes import resident_bytes
from benchmarks.remote import REPOSITORY, RemoteError
from benchmarks.results import write_report
from benchmarks.rival_packages import RivalMissingError
from benchmarks.rival_setups import RIVALS, Rival, Setup
from benchmarks.rivals import Run, Side, _is_measured, measure

SMALLEST = PAGE_SETS[1]


def missing(*_: object) -> Setup:
    raise RivalMissingError("it needs a moon")


def broken(_: object, packages: Path, __: Path) -> Setup:
    package = packages / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rival_process.py").write_text("raise SystemExit('it needs a sun')")
    return Setup(environment={"PYTHONPATH": str(packages)})


def test_what_does_not_run_is_left_out_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = next(rival for rival in RIVALS if rival.name == "memcpy")
    rivals = [Rival(name="far", prepare=missing), Rival(name="broken", prepare=broken), memory]
    storage, packages = tmp_path / "storage", tmp_path / "packages"
    storage.mkdir()
    packages.mkdir()
    report = measure(
        [storage], packages=packages, rivals=rivals, page_sets=[SMALLEST], budget_s=0.0, idle_s=0.1
    )
    write_report(report, tmp_path / "results")

    assert report.verdicts[1] == "Left out: far: it needs a moon"
    assert report.verdicts[2].startswith("Left out: broken, 32 x 64 KB on ")
    assert report.verdicts[2].endswith(": broken: it needs a sun")
    costs, glance, comparisons = report.tables
    assert [row[0] for row in costs.rows] == [OURS, "memcpy"]
    assert glance.columns == ["pages / call", "memcpy"]
    assert [row[1] for row in comparisons.rows] == list(LIMIT_PHASES)
    assert "it needs a moon" in capsys.readouterr().out
    assert list(storage.iterdir()) == []


STUB = """
import sys
from benchmarks.remote import serve

class Stub:
    def open(self, page_set):
        self.page_set = page_set
        return {"moved_bytes": 1, "threads": 1, "resident_bytes": 0}

    def timed(self, phase, round_number):
        if self.page_set in sys.argv[3]:
            raise SystemExit("it does not suit")
        return 0.5

    def finish(self, round_number):
        pass

serve(Stub(), int(sys.argv[-1]))
"""


def stub(packages: Path, *, fails_on: str) -> Setup:
    """A side that does nothing, quickly; SGLang alone takes many seconds to import."""
    package = packages / "benchmarks"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(f"__path__.append({str(REPOSITORY / 'benchmarks')!r})")
    (package / "rival_process.py").write_text(STUB)
    return Setup(settings=(fails_on, {}), environment={"PYTHONPATH": str(packages)})


def test_a_rival_that_fails_on_one_set_of_pages_is_measured_on_the_others(tmp_path: Path) -> None:
    run = Run(packages=tmp_path, page_sets=PAGE_SETS[1:4], budget_s=0.0, idle_s=0.1)
    rival = Rival(name="choosy", prepare=lambda _, packages, __: stub(packages, fails_on=PAGE_SETS[2].name))
    with closing(Side(OURS, tmp_path, stub(tmp_path, fails_on=""))) as ours:
        run._compare_with(rival, ours, tmp_path)

    assert list(run.left_out.values()) == ["choosy: it does not suit"]
    assert next(iter(run.left_out)).startswith(f"choosy, {PAGE_SETS[2].name} on ")
    measured = {comparison.labels["pages"].partition(" on ")[0] for comparison in run.comparisons}
    assert measured == {PAGE_SETS[1].name, PAGE_SETS[3].name}
    assert list(run.costs) == [OURS, "choosy"]


def test_a_failure_of_ours_ends_the_benchmark(tmp_path: Path) -> None:
    run = Run(packages=tmp_path, page_sets=PAGE_SETS[1:3], budget_s=0.0, idle_s=0.1)
    rival = Rival(name="good", prepare=lambda _, packages, __: stub(packages, fails_on=""))
    with (
        closing(Side(OURS, tmp_path, stub(tmp_path, fails_on=SMALLEST.name))) as ours,
        pytest.raises(RemoteError, match="ours: it does not suit"),
    ):
        run._compare_with(rival, ours, tmp_path)


@pytest.mark.parametrize(
    ("name", "directory", "is_first", "expected"),
    [
        ("file", "/dev/shm", True, True),
        ("file", "/proc", False, True),
        ("nixl direct", "/dev/shm", True, False),
        ("nixl direct", "/proc", False, True),
        ("mooncake TCP", "/dev/shm", True, True),
        ("mooncake TCP", "/proc", False, False),
    ],
)
def test_a_rival_is_measured_where_it_makes_a_difference(
    name: str, directory: str, is_first: bool, expected: bool
) -> None:
    rival = next(rival for rival in RIVALS if rival.name == name)
    assert _is_measured(rival, Path(directory), is_first=is_first) is expected


def test_resident_memory_is_what_has_been_touched() -> None:
    size = 64 << 20
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, size) as memory:
        reserved = resident_bytes(os.getpid())
        memory[:] = bytes(size)
        touched = resident_bytes(os.getpid())
    assert reserved - before < size // 2
    assert touched - before >= size


def test_nothing_to_compare_with_is_an_error_that_says_why(tmp_path: Path) -> None:
    run = Run(packages=tmp_path, page_sets=[SMALLEST], budget_s=0.0, idle_s=0.1)
    run.left_out["far"] = "it needs a moon"
    with pytest.raises(RuntimeError, match="far: it needs a moon"):
        run.report()
