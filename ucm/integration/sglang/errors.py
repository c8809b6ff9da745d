# SPDX-License-Identifier: MIT
"""Every error the integration raises by itself; all of them before a pool is in use."""


class UnsupportedPoolError(ValueError):
    """A host pool cannot be stored; the message names pool, layout, limit, and what to change."""
