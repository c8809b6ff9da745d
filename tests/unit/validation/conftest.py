# SPDX-License-Identifier: MIT
"""Fixtures of the validation's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.testing.fake_sglang import FakeSGLang, running_fake

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fake_sglang() -> Iterator[FakeSGLang]:
    """A fake server of this test's own."""
    with running_fake() as fake:
        yield fake
