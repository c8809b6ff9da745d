# SPDX-License-Identifier: MIT
"""Stores keep blocks of bytes under 16-byte keys; they know nothing of models or SGLang."""

from pkgutil import extend_path

from ucm.store.errors import (
    BlockCorruptError,
    StoreConfigError,
    StoreError,
    StoreUnavailableError,
)
from ucm.store.interface import (
    Block,
    BlockKey,
    BlockStatus,
    KVStore,
    StoreSpec,
    StoreStats,
)

__all__ = [
    "Block",
    "BlockCorruptError",
    "BlockKey",
    "BlockStatus",
    "KVStore",
    "StoreConfigError",
    "StoreError",
    "StoreSpec",
    "StoreStats",
    "StoreUnavailableError",
]

__path__ = extend_path(__path__, __name__)
