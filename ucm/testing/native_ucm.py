# SPDX-License-Identifier: MIT
"""UCM's own package, for tests and benchmarks: a wheel that is never installed beside ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# One backend's wheel a Python release; their PosixStores need neither accelerator nor its libraries.
WHEELS = {(3, 11): "uc-manager-cann900-a2==0.9.0rc3", (3, 12): "uc-manager-cuda-cu129==0.9.0rc3"}
REQUIREMENT = "wrapt==1.17.2"
"""Imported by the wheel and not declared."""

DIRECTORY_VARIABLE = "UCM_TEST_NATIVE_PACKAGE"
"""Environment variable that names the directory for tests; set by nox."""


def wheel() -> str | None:
    """Return the wheel for this Python release, if there is one."""
    return WHEELS.get(sys.version_info[:2])


def install(directory: Path) -> None:
    """Install the wheel into `directory`, unless it is there.

    Raises:
        RuntimeError: There is none for this Python release.
        subprocess.CalledProcessError: It cannot be installed.
    """
    name = wheel()
    if name is None:
        raise RuntimeError(f"UCM has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]}")
    complete = directory / f"{name}.complete"
    if complete.exists():
        return
    subprocess.run(  # noqa: S603 -- our own interpreter and these two names.
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
            *("--target", str(directory), name, REQUIREMENT),
        ],
        check=True,
    )
    complete.touch()


def directory() -> Path | None:
    """Return where nox has installed it; None if it has not."""
    found = os.environ.get(DIRECTORY_VARIABLE)
    return Path(found) if found else None


if __name__ == "__main__":
    install(Path(sys.argv[1]))
