# SPDX-License-Identifier: MIT
"""The patches for one SGLang release, in the order of its `series` file."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.patching.errors import PatchFormatError
from ucm.patching.patch_file import Hunk, PatchFile, replace_hunks

if TYPE_CHECKING:
    from collections.abc import Sequence

SERIES = "series"


@dataclass(frozen=True, slots=True)
class PatchSet:
    """All patches for one release; an empty set means that it runs unpatched."""

    version: str
    patches: tuple[PatchFile, ...]

    @classmethod
    def read(cls, directory: Path) -> PatchSet:
        """Read the set of the release that `directory` is named after.

        Raises:
            PatchFormatError: The series or a patch is malformed.
        """
        return cls(directory.name, tuple(PatchFile.read(path) for path in series(directory)))

    @property
    def paths(self) -> list[str]:
        """The files it changes, as paths below the `sglang` package."""
        return sorted({path for patch in self.patches for path in patch.hunks})

    def without(self, name: str) -> PatchSet:
        """Return the set without the named patch."""
        if name not in [patch.name for patch in self.patches]:
            raise ValueError(f"SGLang {self.version} has no patch named {name!r}")
        return PatchSet(self.version, tuple(patch for patch in self.patches if patch.name != name))

    def apply(self, path: str, pristine: bytes) -> bytes:
        """Return the file at `path` with all patches applied.

        Raises:
            PatchConflictError: A patch does not apply exactly.
        """
        text = pristine.decode("utf-8")
        for patch in self.patches:
            text = replace_hunks(text, patch.hunks.get(path, ()), f"{patch.name}: {path}")
        return text.encode("utf-8")

    def revert(self, path: str, patched: bytes) -> bytes:
        """Return the file at `path` with all patches undone.

        Raises:
            PatchConflictError: The file is not the result of these patches.
        """
        text = patched.decode("utf-8")
        for patch in reversed(self.patches):
            hunks: Sequence[Hunk] = patch.hunks.get(path, ())
            text = replace_hunks(text, [hunk.reversed() for hunk in hunks], f"{patch.name} reversed: {path}")
        return text.encode("utf-8")


def series(directory: Path) -> list[Path]:
    """Return the patch files of a set in order.

    A line of the series names a file of its directory, or of another release's directory
    (`../0.5.22/name.patch`) when the same patch serves both.

    Raises:
        PatchFormatError: A patch is missing, listed twice, or present but not listed.
    """
    try:
        text = (directory / SERIES).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PatchFormatError(f"{directory} has no file named {SERIES!r}") from error
    names = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for name in names:
        if not re.fullmatch(r"(\.\./\d[^/]*/)?[a-z0-9-]+\.patch", name):
            raise PatchFormatError(
                f"{directory / SERIES}: {name!r}: expected 'in-words.patch' or '../RELEASE/in-words.patch'"
            )
        if not (directory / name).is_file():
            raise PatchFormatError(f"{directory / SERIES}: {name} does not exist")
    bare = [Path(name).name for name in names]
    if len(set(bare)) != len(bare):
        raise PatchFormatError(f"{directory / SERIES}: a patch name is there twice")
    if unlisted := sorted({path.name for path in directory.iterdir()} - {*names, SERIES}):
        raise PatchFormatError(f"{directory}: not in the series: {unlisted}")
    return [directory / name for name in names]


def patch_sets_directory() -> Path:
    """Return the directory with one patch set per release: in the installed package, or its repository."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "patches" / "sglang"
    return installed if installed.is_dir() else package.parent / "patches" / "sglang"


def supported_versions(root: Path) -> list[str]:
    """Return the releases that have a patch set, oldest first."""
    return sorted((path.parent.name for path in root.glob(f"*/{SERIES}")), key=_release)


def nearest_version(version: str, supported: Sequence[str]) -> str:
    """Return the supported release that is closest to `version`; of two as close, the newer one."""
    return min(reversed(supported), key=lambda candidate: abs(_release(candidate) - _release(version)))


def _release(version: str) -> int:
    """Return a version as one number: "0.5.10.post1" as 0_005_010_001."""
    numbers = [int(number) for number in re.findall(r"\d+", version)][:4]
    return functools.reduce(lambda total, number: total * 1000 + number, numbers + [0] * (4 - len(numbers)))
