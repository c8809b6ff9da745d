# SPDX-License-Identifier: MIT
"""SGLang's two entry points into this package."""

from __future__ import annotations

import os

from sglang_cpu import PLATFORM_NAME, older_releases
from sglang_cpu.families import families

_ENVIRONMENT = {
    # A server whose scheduler dies waits a minute for core dumps of a GPU otherwise.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}


def _selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Answer SGLang's search for a platform (entry point group `sglang.srt.platforms`).

    Returns:
        The platform class, or None unless the operator asked for it: an installed package alone must not move
        a GPU server to the CPU. SGLang's switches that the platform needs are set on the way, unless the
        operator has set them.
    """
    if not _selected():
        return None
    environments = [_ENVIRONMENT, *(family.environment for family in families())]
    if older_releases.is_older():
        older_releases.accept_known_configurations()
        older_releases.answer_with_the_cpu()
        environments.append(older_releases.ENVIRONMENT)
    for environment in environments:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
    return "sglang_cpu.platform:CpuReferencePlatform"


def register() -> None:
    """Register all replacements (entry point group `sglang.srt.plugins`); does nothing on other platforms."""
    if not _selected():
        return
    from sglang_cpu import hicache, hooks, invariant, ranks

    if older_releases.is_older():
        older_releases.install()
    else:
        ranks.install()
    invariant.install()
    hicache.install()
    for family in families():
        family.install()
    hooks.apply()
