# SPDX-License-Identifier: MIT
"""File systems of a test's own, mounted where it wants them; the test is skipped where nobody may mount.

Root may, and so may anybody below `unshare --user --map-root-user --mount`.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def mounted(kind: str, target: Path, *, source: str = "test", options: str = "") -> Iterator[None]:
    """Mount a file system on `target`, a directory that is made if needed."""
    target.mkdir(parents=True, exist_ok=True)
    done = _run("mount", "-t", kind, *(["-o", options] if options else []), source, str(target))
    if done.returncode:
        pytest.skip(f"cannot mount a {kind}: {done.stderr.strip()}")
    try:
        yield
    finally:
        _run("umount", "--lazy", str(target))


def remount(target: Path, options: str) -> None:
    """Change the options of what is mounted on `target`."""
    done = _run("mount", "-o", f"remount,{options}", str(target))
    assert done.returncode == 0, done.stderr  # noqa: S101 -- test support.


def make_disk(image: Path, megabytes: int) -> None:
    """Make a file that can be mounted as an ext4 disk with `options="loop"`."""
    with image.open("wb") as file:
        file.truncate(megabytes * 1024 * 1024)
    try:
        done = _run("mkfs.ext4", "-q", "-F", str(image))
    except FileNotFoundError:
        pytest.skip("there is no mkfs.ext4")
    assert done.returncode == 0, done.stderr  # noqa: S101 -- test support.


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
