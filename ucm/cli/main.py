# SPDX-License-Identifier: MIT
"""`ucm-sglang`: one subcommand per module of this package.

A subcommand module has `add_parser(subparsers)`, which adds its parser and
sets the default `run` to a function that takes the parsed arguments and
returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ucm.cli import cache, patch, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = (cache, patch, validate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ucm-sglang", description="UCM storage for SGLang's hierarchical cache."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
