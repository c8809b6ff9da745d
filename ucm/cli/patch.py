# SPDX-License-Identifier: MIT
"""`ucm-sglang patch`: make `unifiedcache` a named backend of an installed SGLang."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 # argparse has no public name for it.


def add_parser(subparsers: Subparsers) -> None:
    """Add the `patch` command."""
    parser = subparsers.add_parser("patch", help="patch an installed SGLang, or undo it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the parsed command and return its exit status."""
    raise NotImplementedError(arguments)
