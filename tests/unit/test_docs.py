# SPDX-License-Identifier: MIT
"""What the documentation points at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")

NAMED = sorted(
    {
        (document.name, *found)
        for document in (REPOSITORY / "docs").glob("*.md")
        for found in _TEST.findall(document.read_text())
    }
)


@pytest.mark.parametrize(("document", "file", "test"), NAMED)
def test_a_test_named_in_the_documentation_exists(document: str, file: str, test: str) -> None:
    assert re.search(rf"^ *def {test}\(", (REPOSITORY / file).read_text(), re.MULTILINE), document


def test_the_comparison_names_tests() -> None:
    assert len([name for name, *_ in NAMED if name == "compared-with-ucm.md"]) > 30
