# SPDX-License-Identifier: MIT
"""Two ranks must get the bits of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_product_divided_over_two_ranks_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    script = Path(__file__).with_name("row_parallel_process.py")
    processes = [subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)]) for rank in (0, 1)]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
