# SPDX-License-Identifier: MIT
"""Put our functions in the place of SGLang's.

SGLang's own hook registry would do, but it walks through all loaded modules once per hook. With 40 hooks and
6,000 modules that is over a second in each process of a server; here it is one walk. The registry also logs a
target that does not exist, and goes on, where this platform cannot serve.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_wanted: dict[str, Callable[..., Any]] = {}
_applied: set[str] = set()


def replace(target: str, replacement: Callable[..., Any]) -> None:
    """Have `apply` replace the function, method or class at a dotted path, at the place that defines it."""
    _wanted[target] = replacement


def define(module_name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Add functions that a module imports on GPU platforms only, and lacks here. Imports the module."""
    module = importlib.import_module(module_name)
    for name, function in functions.items():
        setattr(module, name, function)


def apply() -> None:
    """Make all replacements, also in modules that have imported the original by name. Imports the targets.

    Raises:
        RuntimeError: A target does not exist; the message names it.
    """
    by_original: dict[int, Callable[..., Any]] = {}
    for target, replacement in _wanted.items():
        if target in _applied:
            continue
        owner_path, _, name = target.rpartition(".")
        try:
            owner = pkgutil.resolve_name(owner_path)
            original = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"this SGLang has no {target} for the CPU reference platform to replace"
            ) from error
        setattr(owner, name, replacement)
        if isinstance(owner, ModuleType):
            by_original[id(original)] = replacement
        _applied.add(target)
    _propagate(by_original)


def verify() -> None:
    """Check that `apply` was called and succeeded.

    Raises:
        RuntimeError: It was not; the message names what was not replaced.
    """
    if missing := sorted(_wanted.keys() - _applied):
        raise RuntimeError(f"the CPU reference platform did not replace {', '.join(missing)}")


def _propagate(by_original: Mapping[int, Callable[..., Any]]) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in by_original:
                names[name] = by_original[id(value)]
