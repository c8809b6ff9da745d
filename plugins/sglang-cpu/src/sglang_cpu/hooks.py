# SPDX-License-Identifier: MIT
"""Put our functions in the place of SGLang's, through SGLang's own hook registry."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_targets: list[str] = []


def replace(target: str, replacement: Callable[..., Any]) -> None:
    """Replace the function, method or class at a dotted path, at the place that defines it.

    SGLang applies the change once all plugins are registered, and also in every module that has imported
    the original by name.
    """
    HookRegistry.register(target, replacement, HookType.REPLACE)
    _targets.append(target)


def define(module_name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Add functions that a module imports on GPU platforms only, and lacks here. Imports the module."""
    module = importlib.import_module(module_name)
    for name, function in functions.items():
        setattr(module, name, function)


def verify() -> None:
    """Check that every replacement is in place.

    Raises:
        RuntimeError: At least one is not; the message names them.
    """
    patched = HookRegistry._patched  # noqa: SLF001 - the registry logs a failed hook, and tells nobody else.
    missing = [target for target in _targets if target not in patched]
    if missing:
        raise RuntimeError(
            f"this SGLang has no {', '.join(missing)} for the CPU reference platform to replace"
        )
