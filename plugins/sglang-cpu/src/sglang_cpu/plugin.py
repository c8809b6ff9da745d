# SPDX-License-Identifier: MIT
"""SGLang's two entry points into this package."""

from __future__ import annotations

import os

from sglang_cpu import PLATFORM_NAME
from sglang_cpu.families import families


def _selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Answer SGLang's search for a platform (entry point group `sglang.srt.platforms`).

    Returns:
        The platform class, or None unless the operator asked for it: an installed package alone must not move
        a GPU server to the CPU.
    """
    if not _selected():
        return None
    for family in families():
        for name, value in family.environment.items():
            os.environ.setdefault(name, value)
    return "sglang_cpu.platform:CpuReferencePlatform"


def register() -> None:
    """Register all replacements (entry point group `sglang.srt.plugins`); does nothing on other platforms."""
    if not _selected():
        return
    from sglang_cpu import hicache, invariant

    invariant.install()
    hicache.install()
    for family in families():
        family.install()
