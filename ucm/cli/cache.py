# SPDX-License-Identifier: MIT
"""`ucm-sglang cache`: look at, verify and clean a storage directory, with servers running or not."""

# ruff: noqa: T201 # A command prints.

from __future__ import annotations

import argparse
import enum
import os
import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.posix import inspection
from ucm.store.posix.inspection import Condition

if TYPE_CHECKING:
    from collections.abc import Iterator

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 # argparse has no public name for it.

_EPILOG = """\
exit status:
  0  done; verify: nothing is damaged
  1  verify: something is damaged or unreadable. clean: something could not be removed
  2  the command line is wrong
  4  not possible; the message says why
"""
_PROGRESS_S = 2.0
_AGE_UNITS = {"m": 60, "h": 3600, "d": 86_400}


class ExitStatus(enum.IntEnum):
    """What the command returns to the shell; `--help` explains it."""

    DONE = 0
    FOUND = 1
    IMPOSSIBLE = 4


def add_parser(subparsers: Subparsers) -> None:
    """Add the `cache` command."""
    parser = subparsers.add_parser(
        "cache",
        help="look at, verify or clean a storage directory",
        description="Look at, verify or clean one of `storage_backends`. Servers may go on using it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    stats = actions.add_parser("stats", help="blocks, sizes and last uses of every pool")
    verify = actions.add_parser("verify", help="read every block and check it; name what is damaged")
    clean = actions.add_parser(
        "clean",
        help="remove what nobody needs; only says what it would do unless --yes is given",
        description="Remove what the options name, all of them together.",
    )
    clean.add_argument("--unfinished", action="store_true", help="files whose writers died")
    clean.add_argument("--foreign", action="store_true", help="files among the blocks that are none")
    clean.add_argument(
        "--damaged", action="store_true", help="blocks that fail to verify (reads all of them)"
    )
    clean.add_argument(
        "--older-than",
        type=_age,
        metavar="AGE",
        help="blocks not used (or, without a capacity, written) for so long: 90m, 12h, 30d",
    )
    clean.add_argument("--yes", action="store_true", help="do it")
    for action, run in ((stats, _stats), (verify, _verify), (clean, _clean)):
        action.add_argument("directory", type=Path)
        action.set_defaults(run=_on_a_directory, on_directory=run)


def _on_a_directory(arguments: argparse.Namespace) -> int:
    if not arguments.directory.is_dir():
        print(f"error: {arguments.directory} is no directory", file=sys.stderr)
        return ExitStatus.IMPOSSIBLE
    status: int = arguments.on_directory(str(arguments.directory.absolute()), arguments)
    return status


def _stats(root: str, _arguments: argparse.Namespace) -> int:
    summaries = inspection.summarize(root)
    rows = [("namespace", "blocks", "GB", "least recent", "most recent")]
    rows += [
        (
            namespace or "(primary KV)",
            str(summary.blocks),
            f"{summary.disk_bytes / 1e9:.3f}",
            _moment(summary.oldest_ns),
            _moment(summary.newest_ns),
        )
        for namespace, summary in sorted(summaries.items())
    ]
    blocks = sum(summary.blocks for summary in summaries.values())
    disk_bytes = sum(summary.disk_bytes for summary in summaries.values())
    rows.append(("total", str(blocks), f"{disk_bytes / 1e9:.3f}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip())
    return ExitStatus.DONE


def _verify(root: str, _arguments: argparse.Namespace) -> int:
    counts = dict.fromkeys(Condition, 0)
    for path, verdict in _verdicts(root):
        counts[verdict.condition] += 1
        if verdict.condition in (Condition.DAMAGED, Condition.UNREADABLE):
            print(f"{verdict.condition.value}: {path}: {verdict.reason}")
    print(", ".join(f"{count} {condition.value}" for condition, count in counts.items()))
    bad = counts[Condition.DAMAGED] + counts[Condition.UNREADABLE]
    return ExitStatus.FOUND if bad else ExitStatus.DONE


def _clean(root: str, arguments: argparse.Namespace) -> int:
    if not (arguments.unfinished or arguments.foreign or arguments.damaged or arguments.older_than):
        print("error: say what to remove: see `ucm-sglang cache clean --help`", file=sys.stderr)
        return ExitStatus.IMPOSSIBLE
    removed, freed_bytes, failed = 0, 0, 0
    for path, reason in _removable(root, arguments):
        try:
            disk_bytes = os.lstat(path).st_blocks * 512
            if arguments.yes:
                Path(path).unlink()
        except FileNotFoundError:
            continue
        except OSError as exc:
            failed += 1
            print(f"cannot remove {path}: {exc.strerror}", file=sys.stderr)
            continue
        removed += 1
        freed_bytes += disk_bytes
        print(f"{reason}: {path}")
    done = "removed" if arguments.yes else "would remove (--yes does it)"
    print(f"{done}: {removed} files, {freed_bytes / 1e9:.3f} GB")
    return ExitStatus.FOUND if failed else ExitStatus.DONE


def _removable(root: str, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield what the options name, each file once, and why."""
    if arguments.unfinished:
        yield from ((path, "unfinished") for path in inspection.unfinished(root))
    if arguments.foreign:
        yield from ((path, "no block") for path in inspection.foreign(root))
    if arguments.older_than:
        limit_ns = time.time_ns() - int(arguments.older_than * 1e9)
        for _namespace, entry in inspection.blocks_below(root):
            if entry.found.st_mtime_ns < limit_ns:
                yield entry.path, f"last used {_moment(entry.found.st_mtime_ns)}"
    if arguments.damaged:
        for path, verdict in _verdicts(root):
            if verdict.condition is Condition.DAMAGED:
                yield path, f"damaged, {verdict.reason}"


def _verdicts(root: str) -> Iterator[tuple[str, inspection.Verdict]]:
    """Verify every block, telling on a terminal how far it is."""
    read_bytes, told_s = 0, time.monotonic()
    for count, (_namespace, entry) in enumerate(inspection.blocks_below(root), start=1):
        yield entry.path, inspection.verify(entry)
        read_bytes += entry.found.st_size
        if sys.stderr.isatty() and time.monotonic() - told_s > _PROGRESS_S:
            told_s = time.monotonic()
            print(f"\r{count} blocks, {read_bytes / 1e9:.1f} GB", end="", file=sys.stderr, flush=True)


def _age(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no age; expected a number and m, h or d, like 30d")
    return float(found[1]) * _AGE_UNITS[found[2]]


def _moment(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M") if time_ns else ""
