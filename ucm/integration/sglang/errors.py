# SPDX-License-Identifier: MIT
"""Every error the integration raises by itself; all of them before a pool is in use."""

from __future__ import annotations


class UnsupportedPoolError(ValueError):
    """A host pool cannot be stored; the message names pool, layout, limit, and what to change."""

    @classmethod
    def because(cls, pool: str, host_pool: object, limit: str) -> UnsupportedPoolError:
        """Name the pool and its layout, then the limit and what to change.

        Args:
            pool: SGLang's name of the pool.
            host_pool: The pool, or whatever was handed over as one.
            limit: The rest of the sentence: "has ...; start with ...".
        """
        layout = getattr(host_pool, "layout", None)
        return cls(f"host pool {pool!r} ({type(host_pool).__name__}, layout {layout!r}) {limit}")
