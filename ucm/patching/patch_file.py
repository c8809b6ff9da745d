# SPDX-License-Identifier: MIT
"""One patch: a header that says why, and hunks that apply exactly or not at all."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import unidiff.errors
import unidiff.patch

from ucm.patching.errors import PatchConflictError, PatchFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

GIT_PREFIX = "python/sglang/"
"""Where SGLang's git tree keeps the package; a wheel has `sglang/` alone."""

REQUIRED_FIELDS = ("Description", "Author", "Forwarded", "Last-Update", "Test", "Remove-When")
OPTIONAL_FIELDS = ("Bug", "Origin")

_FIELD = re.compile(r"([A-Z][A-Za-z-]*): (\S.*)")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines to be replaced and their replacement, both with the context around the change."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    position: str  # As in the patch, for messages: "@@ -148,7 +148,7 @@".

    def reversed(self) -> Hunk:
        """Return the hunk that undoes this one."""
        return Hunk(self.new, self.old, self.position)


@dataclass(frozen=True, slots=True)
class PatchFile:
    """A parsed patch.

    Attributes:
        name: File name, for messages and tables.
        header: DEP-3 fields by name, plus `Test` and `Remove-When`.
        hunks: Per file, as a path below the `sglang` package, its hunks in order.
    """

    name: str
    header: dict[str, str]
    hunks: dict[str, tuple[Hunk, ...]]

    @classmethod
    def read(cls, path: Path) -> PatchFile:
        """Parse a patch file.

        Raises:
            PatchFormatError: The header is incomplete, or the diff does more than change lines of files.
        """
        text = _read_text(path)
        header_text, mark, diff = text.partition("--- a/")
        header = _parse_header(path.name, header_text)
        return cls(path.name, header, dict(_parse_diff(path.name, mark + diff)))


def replace_hunks(text: str, hunks: Iterable[Hunk], where: str) -> str:
    """Return `text` with every hunk applied.

    A hunk applies where its old lines stand, provided they stand exactly so in one place only. Line numbers
    do not matter, so one patch can serve several releases, and no place that merely looks alike is changed.

    Raises:
        PatchConflictError: The old lines of a hunk are absent, ambiguous, or before those of an earlier hunk.
    """
    lines = _lines(text)
    replaced: list[str] = []
    done = 0
    for hunk in hunks:
        starts = list(_occurrences(lines, hunk.old))
        if len(starts) != 1 or starts[0] < done:
            found = "are not there" if not starts else f"start at lines {[start + 1 for start in starts]}"
            raise PatchConflictError(
                f"{where}: hunk {hunk.position}: the lines it changes {found}; expected one place, "
                f"at line {done + 1} or later"
            )
        replaced += lines[done : starts[0]]
        replaced += hunk.new
        done = starts[0] + len(hunk.old)
    return "".join(replaced + lines[done:])


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PatchFormatError(f"{path.name}: not UTF-8: {error}") from error
    if text.startswith("\ufeff") or "\r" in text:
        raise PatchFormatError(f"{path.name}: save it without byte order mark and with LF line ends")
    return text


def _parse_header(name: str, text: str) -> dict[str, str]:
    header: dict[str, str] = {}
    field = None
    for line in text.splitlines():
        if match := _FIELD.fullmatch(line):
            field = match[1]
            if field in header:
                raise PatchFormatError(f"{name}: header field {field!r} is there twice")
            header[field] = match[2]
        elif field and line.startswith(" ") and line.strip():
            header[field] += " " + line.strip()
        elif line.strip():
            raise PatchFormatError(f"{name}: header line {line!r} is no 'Field: value' and no continuation")
    if missing := [field for field in REQUIRED_FIELDS if field not in header]:
        raise PatchFormatError(f"{name}: header lacks {missing}")
    if unknown := sorted(set(header) - {*REQUIRED_FIELDS, *OPTIONAL_FIELDS}):
        raise PatchFormatError(f"{name}: unknown header fields {unknown}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", header["Last-Update"]):
        raise PatchFormatError(f"{name}: Last-Update is {header['Last-Update']!r}, expected YYYY-MM-DD")
    return header


def _parse_diff(name: str, diff: str) -> Iterator[tuple[str, tuple[Hunk, ...]]]:
    try:
        files = unidiff.patch.PatchSet(io.StringIO(diff))
    except unidiff.errors.UnidiffParseError as error:
        raise PatchFormatError(f"{name}: not a unified diff: {error}") from error
    # The parser passes over lines it does not understand, such as those that a wrong count leaves behind.
    if not files or str(files) != diff:
        raise PatchFormatError(
            f"{name}: not a plain unified diff; write the part after the header with `diff -u`"
        )
    if len({file.path for file in files}) != len(files):
        raise PatchFormatError(f"{name}: a file is there twice")
    for file in files:
        path = file.path.removeprefix(GIT_PREFIX)
        if (file.source_file, file.target_file) != (f"a/{GIT_PREFIX}{path}", f"b/{GIT_PREFIX}{path}"):
            raise PatchFormatError(f"{name}: {file.path}: expected a/{GIT_PREFIX}... and the same with b/")
        if not file.is_modified_file or any(line.line_type == "\\" for hunk in file for line in hunk):
            raise PatchFormatError(
                f"{name}: {path}: a patch changes lines of existing files and nothing else"
            )
        yield path, tuple(_hunk(hunk) for hunk in file)


def _hunk(hunk: unidiff.patch.Hunk) -> Hunk:
    return Hunk(
        tuple(line.value for line in hunk.source_lines()),
        tuple(line.value for line in hunk.target_lines()),
        f"@@ -{hunk.source_start},{hunk.source_length} +{hunk.target_start},{hunk.target_length} @@",
    )


def _lines(text: str) -> list[str]:
    """Split at LF only, as diff does; `str.splitlines` would also split at form feeds."""
    return list(io.StringIO(text))


def _occurrences(lines: Sequence[str], wanted: Sequence[str]) -> Iterator[int]:
    size = len(wanted)
    return (at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == wanted)
