# SPDX-License-Identifier: MIT
"""Our backend, keeping a list of what SGLang asked of it.

Selected with `dynamic_storage(root, module_path="ucm.testing.recording_store", class_name="RecordingStore")`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from ucm.integration.sglang.sglang_compat import pool_text
from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    Request: TypeAlias = tuple[str, list[str], dict[str, list[str] | None]]

_RECORDED = (
    "register_mem_pool_host",
    "register_mem_host_pool_v2",
    "batch_exists",
    "batch_exists_v2",
    "batch_get_v1",
    "batch_set_v1",
    "batch_get_v2",
    "batch_set_v2",
)


@dataclass(frozen=True, slots=True)
class StorageCall:
    """One call of SGLang.

    Attributes:
        method: Name of the called method.
        keys: Page hashes given for the anchor.
        pools: Page hashes given for each sidecar; None where SGLang gave none.
        result: What the backend answered.
    """

    method: str
    keys: list[str]
    pools: dict[str, list[str] | None]
    result: object


class RecordingStore(UnifiedCacheStore):
    """Appends to `calls`, in the order in which calls return."""

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: object = None) -> None:
        self.calls: list[StorageCall] = []
        for method in _RECORDED:
            setattr(self, method, functools.partial(self._record, method, getattr(self, method)))
        super().__init__(storage_config, mem_pool_host)

    def of(self, *methods: str) -> list[StorageCall]:
        """Return the calls of some methods."""
        return [call for call in self.calls if call.method in methods]

    def requests(self, *methods: str) -> list[Request]:
        """Return what was asked with some methods, or with all."""
        calls = self.of(*methods) if methods else self.calls
        return [(call.method, call.keys, call.pools) for call in calls]

    def _record(
        self, method: str, call: Callable[..., object], *arguments: object, **keywords: object
    ) -> object:
        keys: list[str] = []
        pools: dict[str, list[str] | None] = {}
        for argument in arguments:
            if isinstance(argument, str):
                pools[pool_text(argument)] = None
            for item in argument if isinstance(argument, list) else ():
                if isinstance(item, PoolTransfer):
                    pools[pool_text(item.name)] = None if item.keys is None else list(item.keys)
                else:
                    keys.append(item)
        result = call(*arguments, **keywords)
        self.calls.append(StorageCall(method, keys, pools, result))
        return result
