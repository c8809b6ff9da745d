# SPDX-License-Identifier: MIT
"""The programs in `scripts/`, which belong to no package, as modules for tests."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_script(name: str) -> Any:  # noqa: ANN401 # A module that no type checker finds.
    """Import `scripts/<name>.py` anew, and return it."""
    module = ModuleType(name)
    module.__file__ = str(_SCRIPTS / f"{name}.py")
    SourceFileLoader(name, module.__file__).exec_module(module)
    return module
