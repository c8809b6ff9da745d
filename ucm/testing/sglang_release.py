# SPDX-License-Identifier: MIT
"""Official SGLang releases, fetched once and unpacked for a test, and the contract tests run on one of them.

Only the package of the release is used. What it stands on comes from the one environment of this repository,
see `release_environment`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.patching.errors import PatchingError
from ucm.testing import release_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.patching.installation import Installation

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACT = "tests/releases/contract"

_WHEELS = "UCM_SGLANG_WHEELS"
_TIMEOUT_S = 600


def release_wheel(version: str) -> Path:
    """Return the official wheel of a release, downloaded on first use.

    `UCM_SGLANG_WHEELS` says where wheels are kept; by default below `.nox`.

    Raises:
        PatchingError: It cannot be had.
    """
    directory = Path(os.environ.get(_WHEELS) or REPOSITORY / ".nox" / "wheels") / version
    if not any(directory.glob("*.whl")):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as unfinished:
            # From 0.5.11 there is one wheel a Python version, with the same Python files.
            options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", f"--dest={unfinished}"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", *options, f"sglang=={version}"]
            if subprocess.run(command, check=False).returncode:  # noqa: S603 # Our own command.
                raise PatchingError(
                    f"the wheel of SGLang {version} could not be downloaded; see pip's words above"
                )
            for wheel in Path(unfinished).glob("*.whl"):
                wheel.replace(directory / wheel.name)
    return next(directory.glob("*.whl"))


def unpack_release(version: str, site_packages: Path) -> Installation:
    """Install a release below `site_packages`, and nothing that it requires.

    Raises:
        PatchingError: Its wheel cannot be had.
    """
    return release_copy.unpack(release_wheel(version), site_packages)


def unpack_patched_release(version: str, site_packages: Path, *, without: str = "") -> Installation:
    """Install a release below `site_packages` and patch it, leaving out the patch named `without`."""
    installation = unpack_release(version, site_packages)
    release_copy.apply_patches(installation, without)
    return installation


def run_contract_tests(
    installation: Installation,
    tests: Sequence[str] = (CONTRACT,),
    *,
    plugin: bool = False,
    report: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run contract tests on the SGLang in a directory of its own.

    Args:
        installation: The SGLang, patched or not.
        tests: What to run, as pytest takes it.
        plugin: Let SGLang load our plugin, instead of no plugin at all.
        report: Where to write what became of each test, in JUnit's format.
    """
    environment = {
        **release_copy.environment(installation),
        "SGLANG_PLUGINS": "ucm" if plugin else "none-of-them",
        "UCM_TEST_RELEASE": installation.version,
        **({"UCM_TEST_PLUGIN": "1"} if plugin else {}),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "ignore", "-p", "no:cacheprovider", *tests]
    if report is not None:
        command.append(f"--junitxml={report}")
    return subprocess.run(  # noqa: S603 # Our own command.
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
