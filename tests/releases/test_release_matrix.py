# SPDX-License-Identifier: MIT
"""The table in `docs/releases.md`: its form, and that it is about what is supported now."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucm.patching.patch_set import PatchSet, patch_sets_directory, supported_versions
from ucm.testing import release_matrix
from ucm.testing.release_matrix import Row

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "releases.md"


def table() -> list[list[str]]:
    """Return the cells of each line, the header first, without the line under it."""
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_it_has_one_line_for_each_supported_release_in_order() -> None:
    assert [row[0] for row in table()[1:]] == supported_versions(patch_sets_directory())


def test_it_has_the_columns_that_are_generated() -> None:
    header = table()[0]
    assert tuple(header) == release_matrix.COLUMNS
    assert {len(row) for row in table()} == {len(header)}


def test_it_counts_the_patches_there_are_now() -> None:
    column = release_matrix.COLUMNS.index("patches")
    counts = {row[0]: int(row[column]) for row in table()[1:]}
    sets = patch_sets_directory()
    assert counts == {version: len(PatchSet.read(sets / version).patches) for version in counts}


@pytest.mark.parametrize(("outcome", "cell"), [("passed", "page_first only"), ("skipped", "no such pools")])
def test_a_cell_says_what_the_test_has_shown(outcome: str, cell: str) -> None:
    tests = {"test_pages_of_sidecars_come_back_in_other_places[mamba-page_first]": outcome}
    row = Row("1.0", ("a.patch",), tests, {}).text()

    assert [each.strip() for each in row.strip("|\n").split("|")][2] == cell


def test_only_the_table_is_replaced(tmp_path: Path) -> None:
    copy = tmp_path / "releases.md"
    text = DOCUMENT.read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")

    release_matrix.write(copy, [Row("1.0", (), {}, {})])

    before, _, rest = text.partition("<!-- generated")
    new_before, _, new_rest = copy.read_text(encoding="utf-8").partition("<!-- generated")
    assert new_before == before
    assert new_rest.partition("<!-- end -->")[2] == rest.partition("<!-- end -->")[2]
    assert "| 1.0 |" in new_rest
