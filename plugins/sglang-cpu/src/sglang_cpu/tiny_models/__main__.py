# SPDX-License-Identifier: MIT
"""Write a tiny model: `python -m sglang_cpu.tiny_models qwen3_5 <directory>`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_cpu.tiny_models import WRITERS


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(prog="python -m sglang_cpu.tiny_models", description=__doc__)
    parser.add_argument("family", choices=sorted(WRITERS))
    parser.add_argument("directory", type=Path, help="created if absent; files of the same name are replaced")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    WRITERS[arguments.family](arguments.directory, arguments.seed)
    print(f"wrote {arguments.family} to {arguments.directory}")  # noqa: T201 - a command's answer.


if __name__ == "__main__":
    main()
