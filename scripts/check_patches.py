# SPDX-License-Identifier: MIT
"""Check the patch sets against the official SGLang releases.

For each release: the series and the files match one to one, every header is complete and names a test that
exists, the patches apply in order with nothing but exact context, the result compiles, and undoing them gives
back the same bytes.

    python scripts/check_patches.py                   # all releases; their wheels are downloaded once
    python scripts/check_patches.py --contract        # and the contract tests on each: some minutes
    python scripts/check_patches.py 0.5.23 --wheel sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl
    python scripts/check_patches.py 0.5.23 --needed   # each patch's test must fail without the patch; or all

The contract tests (`tests/releases/contract`) run on a patched copy of the release, with what this Python's
environment has besides; those of the backend's name once more on the release as it is, with our plugin.
Several releases are checked at the same time.
"""

# A command prints.

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.patching.contract import contract as describe
from ucm.patching.errors import PatchingError
from ucm.patching.patch_set import PatchSet, patch_sets_directory, supported_versions
from ucm.testing import release_matrix
from ucm.testing.release_copy import WITHOUT_PATCH
from ucm.testing.release_matrix import Row, outcomes
from ucm.testing.sglang_release import (
    CONTRACT,
    release_wheel,
    run_contract_tests,
    unpack_patched_release,
    unpack_release,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parents[1]
NAMED_BACKEND = f"{CONTRACT}/test_named_backend.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Check, print one line a release and one a problem, and return the exit status."""
    arguments = _parse_arguments(argv)
    with ThreadPoolExecutor(arguments.jobs) as executor:
        checks = [executor.submit(_check, version, arguments) for version in arguments.versions]
    rows = [check.result() for check in checks]
    if None in rows:
        return 1
    if arguments.matrix:
        release_matrix.write(arguments.matrix, [row for row in rows if row is not None])
    return 0


def check_tests_exist(patch_set: PatchSet) -> None:
    """Check that the test named by each patch is in the repository.

    Raises:
        PatchingError: One is not.
    """
    for patch in patch_set.patches:
        file, _, function = patch.header["Test"].partition("::")
        path = REPOSITORY / file
        if not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
            raise PatchingError(f"{patch.name}: there is no test {patch.header['Test']}")


def check_release(patch_set: PatchSet, package: Path | zipfile.Path) -> None:
    """Check a set against the `sglang` package of its release.

    Raises:
        PatchingError: A patch does not apply, what it makes does not compile, or it cannot be undone.
    """
    for path in patch_set.paths:
        file = package / path
        if not file.is_file():
            raise PatchingError(f"SGLang {patch_set.version} has no {path}")
        pristine = file.read_bytes()
        patched = patch_set.apply(path, pristine)
        try:
            compile(patched, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise PatchingError(f"{path} does not compile when patched: {error}") from error
        if patch_set.revert(path, patched) != pristine:
            raise PatchingError(f"{path} differs from the release after the patches are undone")


def check_contract(version: str) -> Row:
    """Run the contract tests on the release, patched and with our plugin; return what each has shown.

    Raises:
        PatchingError: A test fails.
    """
    patches = [patch.name for patch in PatchSet.read(patch_sets_directory() / version).patches]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        report, plugin_report = root / "patched.xml", root / "plugin.xml"
        result = run_contract_tests(unpack_patched_release(version, root / "patched"), report=report)
        _require_success(result)
        released = unpack_release(version, root / "released")
        if not released.has_plugin_system:
            return Row(version, patches, outcomes(report), {})
        result = run_contract_tests(released, [NAMED_BACKEND], plugin=True, report=plugin_report)
        _require_success(result)
        return Row(version, patches, outcomes(report), outcomes(plugin_report))


def check_contract_text(version: str) -> None:
    """Check that the committed description of the release's storage contract is what its source says.

    Raises:
        PatchingError: It is not.
    """
    committed = REPOSITORY / "contracts" / "sglang" / f"{version}.md"
    text = describe(version, zipfile.Path(release_wheel(version), "sglang/"))
    if not committed.is_file() or committed.read_text(encoding="utf-8") != text:
        raise PatchingError(f"{committed.relative_to(REPOSITORY)} is not what SGLang {version} says")


def _require_success(result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode:
        raise PatchingError(f"contract tests fail:\n{result.stdout[-4000:]}{result.stderr[-2000:]}")


def check_needed(patch_set: PatchSet) -> None:
    """Check that the tests of the patches pass with all of them, and that each fails without its own.

    Raises:
        PatchingError: One does not.
    """
    tests = {patch.name: patch.header["Test"] for patch in patch_set.patches}
    contract = {test for test in tests.values() if test.startswith(CONTRACT)}
    for together in (contract, set(tests.values()) - contract):
        if together:
            _run_tests(patch_set.version, sorted(together), without="", expected=0)
    for name, test in tests.items():
        # 1 is pytest's status for failing tests; others say that it could not run them.
        _run_tests(patch_set.version, [test], without=name, expected=1)
        print(f"SGLang {patch_set.version}: {name} is needed", flush=True)


def _run_tests(version: str, tests: list[str], *, without: str, expected: int) -> None:
    if tests[0].startswith(CONTRACT):
        with tempfile.TemporaryDirectory() as directory:
            result = run_contract_tests(
                unpack_patched_release(version, Path(directory), without=without), tests
            )
    else:
        result = subprocess.run(  # The command is ours.
            [sys.executable, "-m", "pytest", "-q", *tests, "-k", version],
            cwd=REPOSITORY,
            env={**os.environ, WITHOUT_PATCH: without},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode != expected:
        raise PatchingError(
            f"{shlex.join(tests)} on SGLang {version} without {without or 'nothing'} returned "
            f"{result.returncode}, expected {expected}:\n{result.stdout[-2000:]}"
        )


def _check(version: str, arguments: argparse.Namespace) -> Row | None:
    """Make the checks asked for on one release, and print what they say; None if one fails."""
    start = time.monotonic()
    row = Row(version, (), {}, {})
    try:
        patch_set = PatchSet.read(patch_sets_directory() / version)
        check_tests_exist(patch_set)
        check_release(patch_set, _package(version, arguments.wheel, arguments.tree))
        report = f"SGLang {version}: {len(patch_set.patches)} patches, {len(patch_set.paths)} files: good"
        if arguments.contract or arguments.matrix:
            check_contract_text(version)
            row = check_contract(version)
            report += f"\n    contract tests: {row.summary()} ({time.monotonic() - start:.0f} s)"
        if arguments.needed:
            check_needed(patch_set)
    except PatchingError as error:
        print(f"SGLang {version}: {error}", file=sys.stderr)
        return None
    print(report, flush=True)
    return row


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the patch sets against the official SGLang releases.")
    supported = supported_versions(patch_sets_directory())
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"default: all ({', '.join(supported)})"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--wheel", type=Path, help="SGLang's wheel of the one VERSION given")
    where.add_argument("--tree", type=Path, help="directory that has its `sglang` package")
    parser.add_argument("--contract", action="store_true", help="also run the contract tests on each release")
    parser.add_argument(
        "--matrix", type=Path, metavar="FILE", help="run them on all releases and write what they show"
    )
    parser.add_argument("--needed", action="store_true", help="also run each patch's test without the patch")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(4, os.cpu_count() or 1),
        help="releases to check at the same time (default: one a core, here %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.versions) - set(supported):
        parser.error(
            f"no patches for {', '.join(sorted(unknown))}; there are patches for {', '.join(supported)}"
        )
    if (arguments.wheel or arguments.tree) and len(arguments.versions) != 1:
        parser.error("--wheel and --tree want exactly one VERSION")
    if arguments.matrix and arguments.versions:
        parser.error("--matrix is about all releases")
    arguments.versions = arguments.versions or supported
    return arguments


def _package(version: str, wheel: Path | None, tree: Path | None) -> Path | zipfile.Path:
    if tree is not None:
        return tree / "sglang"
    if wheel is None:
        wheel = release_wheel(version)
    if not wheel.name.startswith(f"sglang-{version}-"):
        raise PatchingError(f"{wheel.name} is not SGLang {version}")
    return zipfile.Path(wheel, "sglang/")


if __name__ == "__main__":
    sys.exit(main())
