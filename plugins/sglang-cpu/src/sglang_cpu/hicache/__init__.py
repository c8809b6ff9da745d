# SPDX-License-Identifier: MIT
"""HiCache's edges to the device: host registration, pinned memory, and the copies between the two tiers."""


def install() -> None:
    """Register what HiCache needs on this platform."""
    from sglang_cpu.hicache import replacements

    replacements.install()
