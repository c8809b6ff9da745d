# SPDX-License-Identifier: MIT
"""Patch files and series: what is accepted, and where hunks apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.patching.errors import PatchConflictError, PatchFormatError
from ucm.patching.patch_file import Hunk, PatchFile, replace_hunks
from ucm.patching.patch_set import PatchSet, nearest_version, series

if TYPE_CHECKING:
    from pathlib import Path

HEADER = """\
Description: Change one line,
 and say why
Author: Somebody
Forwarded: no
Last-Update: 2026-11-30
Test: tests/test_something.py::test_it
Remove-When: SGLang does it
"""
DIFF = """\
--- a/python/sglang/srt/module.py
+++ b/python/sglang/srt/module.py
@@ -1,3 +1,3 @@
 before
-old
+new
 after
"""
MODULE = "before\nold\nafter\n"


def patch_set(directory: Path, **patches: str) -> PatchSet:
    """Write a patch set whose series lists `patches` in order, and read it."""
    directory.mkdir(parents=True)
    for name, text in patches.items():
        (directory / f"{name}.patch").write_text(text)
    (directory / "series").write_text("".join(f"{name}.patch\n" for name in patches))
    return PatchSet.read(directory)


def test_a_patch_applies_and_its_reversal_gives_back_the_same_bytes(tmp_path: Path) -> None:
    patches = patch_set(tmp_path / "1.0", change=f"{HEADER}\n{DIFF}")
    patched = patches.apply("srt/module.py", MODULE.encode())
    assert patched == b"before\nnew\nafter\n"
    assert patches.revert("srt/module.py", patched) == MODULE.encode()


def test_later_patches_build_on_earlier_ones(tmp_path: Path) -> None:
    second = DIFF.replace("-old", "-new").replace("+new\n", "+newer\n")
    patches = patch_set(tmp_path / "1.0", first=f"{HEADER}\n{DIFF}", second=f"{HEADER}\n{second}")
    patched = patches.apply("srt/module.py", MODULE.encode())
    assert patched == b"before\nnewer\nafter\n"
    assert patches.revert("srt/module.py", patched) == MODULE.encode()


def test_other_files_stay_as_they_are(tmp_path: Path) -> None:
    patches = patch_set(tmp_path / "1.0", change=f"{HEADER}\n{DIFF}")
    assert patches.paths == ["srt/module.py"]
    assert patches.apply("srt/other.py", MODULE.encode()) == MODULE.encode()


def test_the_header_is_read_with_its_continuation_lines(tmp_path: Path) -> None:
    (tmp_path / "change.patch").write_text(f"{HEADER}\n{DIFF}")
    header = PatchFile.read(tmp_path / "change.patch").header
    assert header["Description"] == "Change one line, and say why"
    assert header["Test"] == "tests/test_something.py::test_it"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (DIFF, "lacks"),
        (HEADER.replace("Remove-When", "Remove-After") + DIFF, "lacks ['Remove-When']"),
        (HEADER + "Reviewer: Somebody\n" + DIFF, "unknown header fields ['Reviewer']"),
        (HEADER + "Author: Else\n" + DIFF, "'Author' is there twice"),
        (HEADER + "stray words\n" + DIFF, "'stray words'"),
        (HEADER.replace("2026-11-30", "yesterday") + DIFF, "expected YYYY-MM-DD"),
        ("\ufeff" + HEADER + DIFF, "byte order mark"),
        (HEADER + DIFF.replace("\n", "\r\n"), "LF line ends"),
        (HEADER, "not a plain unified diff"),
        (HEADER + DIFF.replace("-1,3 +1,3", "-1,2 +1,2"), "unified diff"),
        (HEADER + DIFF.replace("-1,3 +1,3", "-1,4 +1,4"), "unified diff"),
        (HEADER + DIFF + "left over\n", "not a plain unified diff"),
        (HEADER + DIFF + DIFF, "a file is there twice"),
        (HEADER + DIFF.replace("/python/sglang/", "/"), "expected a/python/sglang/"),
        (
            HEADER + DIFF.replace("b/python/sglang/srt/module.py", "b/python/sglang/srt/other.py"),
            "same with b/",
        ),
        (HEADER + DIFF + "\\ No newline at end of file\n", "nothing else"),
        (
            HEADER + "--- a/python/sglang/new.py\n+++ b/python/sglang/new.py\n@@ -0,0 +1,1 @@\n+x\n",
            "nothing else",
        ),
    ],
)
def test_a_malformed_patch_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "change.patch").write_bytes(text.encode())
    with pytest.raises(PatchFormatError) as refusal:
        PatchFile.read(tmp_path / "change.patch")
    assert complaint in str(refusal.value)
    assert "change.patch" in str(refusal.value)


def test_a_patch_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "change.patch").write_bytes(b"Description: \xff\n")
    with pytest.raises(PatchFormatError, match="UTF-8"):
        PatchFile.read(tmp_path / "change.patch")


HUNK = Hunk(("before\n", "old\n", "after\n"), ("before\n", "new\n", "after\n"), "@@ -1,3 +1,3 @@")


def test_a_hunk_applies_wherever_its_lines_stand() -> None:
    assert replace_hunks("x\n" * 500 + MODULE, [HUNK], "m") == "x\n" * 500 + "before\nnew\nafter\n"


@pytest.mark.parametrize(
    "text",
    ["", "before\nolder\nafter\n", "before\nold \nafter\n", "before\nold\n", "before\nold\nafter"],
    ids=["empty", "changed", "blank added", "context missing", "no line end"],
)
def test_a_hunk_does_not_apply_to_lines_that_merely_look_alike(text: str) -> None:
    with pytest.raises(PatchConflictError, match="are not there"):
        replace_hunks(text, [HUNK], "m")


def test_a_hunk_that_fits_two_places_is_refused() -> None:
    with pytest.raises(PatchConflictError, match=r"lines \[1, 4\]"):
        replace_hunks(MODULE + MODULE, [HUNK], "m")


def test_hunks_out_of_order_are_refused() -> None:
    other = Hunk(("last\n",), ("end\n",), "@@ -4,1 +4,1 @@")
    assert replace_hunks(MODULE + "last\n", [HUNK, other], "m") == "before\nnew\nafter\nend\n"
    with pytest.raises(PatchConflictError, match="or later"):
        replace_hunks(MODULE + "last\n", [other, HUNK], "m")


def test_form_feeds_do_not_end_lines() -> None:
    text = "x\x0cy\n" + MODULE
    assert replace_hunks(text, [HUNK], "m") == "x\x0cy\nbefore\nnew\nafter\n"


def test_a_series_may_list_patches_of_another_release(tmp_path: Path) -> None:
    patch_set(tmp_path / "1.0", change=f"{HEADER}\n{DIFF}")
    (tmp_path / "1.1").mkdir()
    (tmp_path / "1.1" / "series").write_text("# As in 1.0.\n../1.0/change.patch\n")
    assert [patch.name for patch in PatchSet.read(tmp_path / "1.1").patches] == ["change.patch"]


def test_an_empty_series_is_a_release_without_patches(tmp_path: Path) -> None:
    assert patch_set(tmp_path / "1.0").patches == ()


@pytest.mark.parametrize(
    ("listed", "complaint"),
    [
        ("one.patch\nmissing.patch\n", "missing.patch does not exist"),
        ("one.patch\none.patch\n", "twice"),
        ("", "not in the series: ['one.patch']"),
        ("/etc/one.patch\n", "expected"),
        ("01-One.patch\n", "expected"),
        ("../../one.patch\n", "expected"),
    ],
)
def test_a_series_that_does_not_match_its_files_is_refused(
    tmp_path: Path, listed: str, complaint: str
) -> None:
    (tmp_path / "one.patch").touch()
    (tmp_path / "series").write_text(listed)
    with pytest.raises(PatchFormatError) as refusal:
        series(tmp_path)
    assert complaint in str(refusal.value)


def test_a_directory_without_series_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchFormatError, match="series"):
        series(tmp_path)


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.5.24", "0.5.23"),
        ("0.5.8", "0.5.9"),
        ("0.5.11", "0.5.10.post1"),
        ("0.6.0", "0.5.23"),
        ("0.5.23.dev3", "0.5.23"),
    ],
)
def test_the_nearest_release_goes_by_numbers(version: str, nearest: str) -> None:
    assert nearest_version(version, ["0.5.9", "0.5.10.post1", "0.5.23"]) == nearest
