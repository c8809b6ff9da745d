# SPDX-License-Identifier: MIT
"""Unified cache management: keep the KV cache of large models on storage."""

from pkgutil import extend_path

# A separately installed UCM owns the same top-level name; its modules stay importable beside ours.
__path__ = extend_path(__path__, __name__)
