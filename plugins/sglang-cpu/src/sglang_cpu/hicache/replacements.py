# SPDX-License-Identifier: MIT
"""Where HiCache meets the device."""


def install() -> None:
    """Register HiCache's replacements."""
