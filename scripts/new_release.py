# SPDX-License-Identifier: MIT
"""Start the patch set of a new SGLang release from the nearest one, and report what has changed.

    python scripts/new_release.py 0.5.24

1. The series: each patch of the nearest release is tried on the official wheel, in order. One that applies is
   listed where it is; one that does not is named, with the reason, and left to a human.
2. The contract (`contracts/sglang/<release>.md`): what the release asks of a storage backend, read from its
   source, is written and compared with the nearest release's.
3. Still needed? Each patch's test is run without it, also that of a patch that does not apply. If it passes,
   the patch may go.
4. The contract tests are run on the patched release.

The exit status is 0 if every patch applies and is needed and the tests pass; the report says what to do else.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.patching.contract import contract
from ucm.patching.errors import PatchConflictError, PatchingError
from ucm.patching.patch_file import PatchFile
from ucm.patching.patch_set import (
    SERIES,
    PatchSet,
    nearest_version,
    patch_sets_directory,
    series,
    supported_versions,
)
from ucm.patching.patcher import Patcher
from ucm.testing.sglang_release import CONTRACT, release_wheel, run_contract_tests, unpack_release

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parents[1]
CONTRACTS = REPOSITORY / "contracts" / "sglang"


def main(argv: Sequence[str] | None = None) -> int:
    """Start the set, print the report, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="release without a patch set")
    parser.add_argument("--sets", type=Path, default=patch_sets_directory(), help="default: ours")
    parser.add_argument("--contracts", type=Path, default=CONTRACTS, help="default: ours")
    parser.add_argument("--no-tests", action="store_true", help="leave out steps 3 and 4")
    arguments = parser.parse_args(argv)
    if (arguments.sets / arguments.version / SERIES).exists():
        parser.error(f"SGLang {arguments.version} has a patch set already")
    nearest = nearest_version(arguments.version, supported_versions(arguments.sets))
    try:
        package = zipfile.Path(release_wheel(arguments.version), "sglang/")
        left_out = start_series(arguments.sets, arguments.version, nearest, package)
        good = not left_out
        compare_contracts(arguments.contracts, arguments.version, nearest, package)
        if not arguments.no_tests:
            patch_set = PatchSet.read(arguments.sets / arguments.version)
            print("\nEach patch's test without the patch:")
            patches = [*patch_set.patches, *left_out]
            good = all([good, *(still_needed(patch_set, patch) for patch in patches)])
            good = contract_holds(patch_set) and good
    except PatchingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\nThen: CONTRIBUTING.md, 'A new SGLang release'.")
    return 0 if good else 1


def start_series(root: Path, version: str, nearest: str, package: zipfile.Path) -> list[PatchFile]:
    """Write the series of `version` with the patches of `nearest` that apply; return the others."""
    print(f"Patches of SGLang {nearest} on SGLang {version}:")
    directory = root / version
    directory.mkdir()
    accepted: list[Path] = []
    left_out: list[PatchFile] = []
    for path in series(root / nearest):
        patches = tuple(PatchFile.read(each) for each in [*accepted, path])
        attempt = PatchSet(version, patches)
        try:
            for file in patches[-1].hunks:
                pristine = package / file
                if not pristine.is_file():
                    raise PatchConflictError(f"{path.name}: SGLang {version} has no {file}")
                attempt.apply(file, pristine.read_bytes())
        except PatchConflictError as error:
            print(f"  DOES NOT APPLY  {error}")
            left_out.append(patches[-1])
        else:
            print(f"  applies         {path.name}")
            accepted.append(path)
    lines = [os.path.relpath(path.resolve(), directory.resolve()) for path in accepted]
    (directory / SERIES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return left_out


def compare_contracts(root: Path, version: str, nearest: str, package: zipfile.Path) -> None:
    """Write the contract of `version`, and print how it differs from that of `nearest`."""
    new = contract(version, package)
    (root / f"{version}.md").write_text(new, encoding="utf-8")
    known = root / f"{nearest}.md"
    old = known.read_text(encoding="utf-8") if known.exists() else ""
    print(f"\nContract, compared with SGLang {nearest} (all of it: {root / f'{version}.md'}):")
    difference = difflib.unified_diff(
        old.splitlines()[1:], new.splitlines()[1:], nearest, version, n=0, lineterm=""
    )
    print("\n".join(f"  {line}" for line in difference) or "  no difference")


def still_needed(patch_set: PatchSet, patch: PatchFile) -> bool:
    """Run the test of a patch without the patch, print the verdict, and tell whether it is needed."""
    test = patch.header["Test"]
    if not test.startswith(CONTRACT):
        print(f"  not tried here  {patch.name}: run {test} with UCM_TEST_WITHOUT_PATCH={patch.name}")
        return True
    with tempfile.TemporaryDirectory() as directory:
        installation = unpack_release(patch_set.version, Path(directory))
        others = patch_set.without(patch.name) if patch in patch_set.patches else patch_set
        Patcher(others, installation).apply()
        result = run_contract_tests(installation, [test])
    # 1 is pytest's status for failing tests.
    verdict = {0: "NOT NEEDED", 1: "needed"}.get(result.returncode, "CANNOT BE TOLD")
    print(f"  {verdict:15} {patch.name}", flush=True)
    return result.returncode == 1


def contract_holds(patch_set: PatchSet) -> bool:
    """Run the contract tests on the patched release, print their summary, and tell whether they pass."""
    with tempfile.TemporaryDirectory() as directory:
        installation = unpack_release(patch_set.version, Path(directory))
        Patcher(patch_set, installation).apply()
        result = run_contract_tests(installation)
    print("\nContract tests on the patched release:")
    lines = result.stdout.strip().splitlines()
    print("\n".join(f"  {line}" for line in (lines[-40:] if result.returncode else lines[-1:])))
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
