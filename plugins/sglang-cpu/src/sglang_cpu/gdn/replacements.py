# SPDX-License-Identifier: MIT
"""Which SGLang functions the gated delta network kernels stand in for."""


def install() -> None:
    """Register the family's replacements."""
