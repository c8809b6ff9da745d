# SPDX-License-Identifier: MIT
"""`ucm-sglang patch`: make `unifiedcache` a named backend of an installed SGLang, or undo that."""

# ruff: noqa: T201 # A command prints.

from __future__ import annotations

import argparse
import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.patching.errors import InstallationError, PatchingError
from ucm.patching.installation import (
    Installation,
    find_by_directory,
    find_by_interpreter,
    find_by_search_path,
)
from ucm.patching.patch_set import PatchSet, nearest_version, patch_sets_directory, supported_versions
from ucm.patching.patcher import Patcher, PatchState

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 # argparse has no public name for it.

_EPILOG = """\
exit status:
  0  patched (status), or done (apply, revert)
  1  status: not patched
  2  the command line is wrong
  3  status: partly patched, or by another version of this tool; apply and revert both put that right
  4  not possible; the message says why and what to do. Nothing was changed
"""


class ExitStatus(enum.IntEnum):
    """What the command returns to the shell; `--help` explains it."""

    DONE = 0
    NOT_PATCHED = 1
    INCOMPLETE = 3
    IMPOSSIBLE = 4


_STATUS_OF_STATE = {
    PatchState.APPLIED: ExitStatus.DONE,
    PatchState.NOT_APPLIED: ExitStatus.NOT_PATCHED,
    PatchState.INCOMPLETE: ExitStatus.INCOMPLETE,
    PatchState.FOREIGN: ExitStatus.IMPOSSIBLE,
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the `patch` command."""
    parser = subparsers.add_parser(
        "patch",
        help="patch an installed SGLang, or undo it",
        description="Make `--hicache-storage-backend unifiedcache` known to an installed SGLang.\n"
        "Only releases that have a patch set are touched, and all files of a set or none.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["status", "apply", "revert"])
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--sglang-dir",
        type=Path,
        metavar="DIR",
        help="SGLang's package directory, .../site-packages/sglang (default: the SGLang of this Python)",
    )
    where.add_argument("--python", metavar="PYTHON", help="the Python interpreter whose SGLang is meant")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the parsed command and return its exit status."""
    try:
        installation = _find(arguments)
        patch_set = _patch_set(installation)
        patcher = Patcher(patch_set, installation)
        if arguments.action == "status":
            return _print_status(patch_set, installation, patcher)
        changed = patcher.apply() if arguments.action == "apply" else patcher.revert()
    except PatchingError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.IMPOSSIBLE
    done = "patched" if arguments.action == "apply" else "no longer patched"
    outcome = f"{done}; restart servers that use it" if changed else "nothing to do"
    print(f"SGLang {installation.version} in {installation.package}: {outcome}")
    return ExitStatus.DONE


def _find(arguments: argparse.Namespace) -> Installation:
    if arguments.sglang_dir is not None:
        return find_by_directory(arguments.sglang_dir)
    if arguments.python is not None:
        return find_by_interpreter(arguments.python)
    return find_by_search_path()


def _patch_set(installation: Installation) -> PatchSet:
    root = patch_sets_directory()
    supported = supported_versions(root)
    if installation.version in supported:
        return PatchSet.read(root / installation.version)
    route = (
        "This SGLang loads plugins, so the backend may work without patching (untested with this release): "
        "`--hicache-storage-backend unifiedcache` while ucm-sglang is installed"
        if installation.has_plugin_system
        else "This SGLang loads no plugins: `--hicache-storage-backend dynamic` is the way without patching"
    )
    nearest = nearest_version(installation.version, supported)
    raise InstallationError(
        f"no patches for SGLang {installation.version} in {installation.package}; there are patches for "
        f"{', '.join(supported)}, and the nearest is {nearest}. {route}"
    )


def _print_status(patch_set: PatchSet, installation: Installation, patcher: Patcher) -> int:
    state = patcher.state()
    print(f"SGLang {installation.version} in {installation.package}: {state.value}")
    if not patch_set.patches:
        print("This release needs no patches.")
    patches = {
        path: [patch.name for patch in patch_set.patches if path in patch.hunks] for path in patch_set.paths
    }
    rows = [
        (file.path, file.state.value, name)
        for file in patcher.files()
        for name in patches.get(file.path, ["-"])
    ]
    if rows:
        rows.insert(0, ("file", "state", "patch"))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        print()
        for path, file_state, name in rows:
            print(f"{path:{widths[0]}}  {file_state:{widths[1]}}  {name}")
    if not installation.recorded:
        print("\nThe installer recorded no digests of SGLang's files: told from the patches alone.")
    return _STATUS_OF_STATE[state]
