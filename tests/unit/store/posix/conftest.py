# SPDX-License-Identifier: MIT
"""Where the tests of the PosixStore keep their files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def memory() -> Path:
    """A file system in memory."""
    directory = Path("/dev/shm")
    if not directory.is_dir():
        pytest.skip("there is no /dev/shm")
    return directory
