# SPDX-License-Identifier: MIT
"""Only `sglang_compat` knows that SGLang's releases differ, and it does not ask for their numbers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ucm

PACKAGE = Path(ucm.__file__).parent
# Patch sets are named after releases, and test code builds what each of them has.
SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ("cli", "patching", "testing")
]
MAY_NAME_SGLANG = {"plugin.py", "sglang_compat.py", "unifiedcache_store.py"}


def versions_asked_for(tree: ast.AST) -> list[int]:
    """Return the lines that look at a version, or compare with the number of one."""
    lines = []
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        numbers = (
            [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            if isinstance(node, ast.Compare)
            else []
        )
        compared = any(isinstance(value, str) and re.match(r"\d+\.\d+", value) for value in numbers)
        if compared or name in ("__version__", "sglang_version", "version_info"):
            lines.append(node.lineno)  # type: ignore[attr-defined] # Every such node has one.
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_asks_for_a_version(path: Path) -> None:
    assert versions_asked_for(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    ["import sglang\nif sglang.__version__ >= '0.5.19':\n    pass", "old = version('sglang') < '0.5.9'"],
)
def test_code_that_asks_for_a_version_is_found(code: str) -> None:
    assert versions_asked_for(ast.parse(code))


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.name not in MAY_NAME_SGLANG], ids=lambda path: path.name
)
def test_no_other_module_names_a_part_of_sglang(path: Path) -> None:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    named = [
        node.lineno
        for node in ast.walk(tree)
        if id(node) not in typing_only
        and (
            (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"))
            or (isinstance(node, ast.Import) and any(alias.name.startswith("sglang") for alias in node.names))
            or (isinstance(node, ast.Constant) and str(node.value).startswith("sglang.srt"))
        )
    ]

    assert named == []
