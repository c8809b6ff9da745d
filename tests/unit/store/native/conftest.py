# SPDX-License-Identifier: MIT
"""UCM's own package, if nox has installed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.testing import native_ucm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def native_package() -> Path:
    directory = native_ucm.directory()
    if directory is None:
        pytest.skip("UCM's own package is not installed; nox -s native does that")
    return directory
