# SPDX-License-Identifier: MIT
"""A store of UCM's package as a KVStore: deadlines, verdicts and checksums are ours."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from ucm.store.errors import StoreConfigError, StoreUnavailableError
from ucm.store.native.blocks import NativeFiles, NativeObjects, remove_unfinished
from ucm.store.native.connector import NativeCallError, NativeConnector
from ucm.store.options import as_bool
from ucm.store.posix.block_file import file_bytes
from ucm.store.posix.engine import Urgency
from ucm.store.posix.engine_store import EngineStore
from ucm.store.posix.layout import SHARD_HEX_DIGITS, SHARDS
from ucm.store.posix.store import PosixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.store.interface import BlockKey, KVStore, StoreSpec
    from ucm.store.native.config import NativeStoreConfig
    from ucm.store.posix.engine import IoEngine

logger = logging.getLogger(__name__)

_SHARDS_PER_ITEM = 64
_SECTOR_BYTES = 512

T = TypeVar("T")


def open_native_store(spec: StoreSpec, config: NativeStoreConfig) -> KVStore:
    """Open the native store for blocks of `spec`.

    Raises:
        StoreConfigError: UCM's package cannot be imported.
        StoreUnavailableError: The store refuses to open; says why.
    """
    return (NativeFileStore if config.keeps_plain_files else NativeObjectStore)(spec, config)


class NativeFileStore(PosixStore):
    """The native PosixStore: its files are those of the embedded store, byte for byte.

    Raises:
        StoreConfigError: Its options cannot work with blocks of this size.
    """

    _connector: NativeConnector | None = None

    def __init__(self, spec: StoreSpec, config: NativeStoreConfig) -> None:
        if as_bool("io_direct", config.options["io_direct"]) and spec.block_bytes % _SECTOR_BYTES:
            raise StoreConfigError(
                f"option 'io_direct' is true; expected false: a page of {spec.namespace or 'primary KV'} "
                f"has {spec.block_bytes} bytes, and direct I/O needs a multiple of {_SECTOR_BYTES}"
            )
        self._native_config = config
        super().__init__(spec, config.own)

    def close(self) -> None:
        """See `KVStore`; takes the native store three or four seconds, with the GIL held."""
        super().close()
        if self._connector is not None:
            self._connector.close()

    def _open(self) -> NativeFiles:
        # Finds out whether storage answers: the native store would wait for it with the GIL held.
        self._prepare_directories()
        directories = list(self.layout.directories)
        self._connector = _connect(self, self._native_config, directories, self.spec.block_bytes)
        self._remove_orphans(directories[0])
        return NativeFiles(
            self.spec, self.layout, self._connector, accept_unverified=self.config.accept_unverified
        )

    def _remove_orphans(self, directory: str) -> None:
        """Remove unfinished files of dead writers, as many as can be found in time."""
        shards = [f"{directory}/{number:0{SHARD_HEX_DIGITS}x}" for number in range(SHARDS)]
        counts = self.engine.run(
            lambda index, _scratch, _lease: sum(
                map(remove_unfinished, shards[index * _SHARDS_PER_ITEM : (index + 1) * _SHARDS_PER_ITEM])
            ),
            SHARDS // _SHARDS_PER_ITEM,
            urgency=Urgency.WRITE,
            timeout_s=self.config.dump_timeout_s,
        )
        removed = sum(count or 0 for count in counts)
        if removed:
            logger.info("removed %d unfinished files of dead writers from %s", removed, directory)


class NativeObjectStore(EngineStore):
    """Any other native store; blocks can be found by their keys only, and never removed."""

    _connector: NativeConnector | None = None

    def __init__(self, spec: StoreSpec, config: NativeStoreConfig) -> None:
        self._native_config = config
        super().__init__(spec, config.own)

    def scan(self) -> Iterator[BlockKey]:
        """Yield nothing: the native interface lists nothing."""
        self._require_open()
        logger.warning("store %s cannot list its blocks", self.label)
        return iter(())

    def close(self) -> None:
        """See `NativeFileStore`."""
        super().close()
        if self._connector is not None:
            self._connector.close()

    def _open(self) -> NativeObjects:
        config = self._native_config
        directories = [
            f"{root}/{self.spec.namespace}" if self.spec.namespace else root
            for root in config.storage_backends
        ]
        self._connector = _connect(self, config, directories, file_bytes(self.spec))
        return NativeObjects(
            self.spec, self._connector, str(config.options.get("store_pipeline", config.connector_name))
        )


def _connect(
    store: EngineStore, config: NativeStoreConfig, directories: list[str], size: int
) -> NativeConnector:
    try:
        return _in_time(
            store.engine, store.config.dump_timeout_s, lambda: NativeConnector(size, config, directories)
        )
    except NativeCallError as exc:
        raise StoreUnavailableError(
            f"the native store {config.connector_name} refuses to open for {store.label}: {exc}"
        ) from exc


def _in_time(engine: IoEngine, timeout_s: float, call: Callable[[], T]) -> T:
    [result] = engine.run(
        lambda _index, _scratch, _lease: call(), 1, urgency=Urgency.WRITE, timeout_s=timeout_s
    )
    if result is None:
        raise StoreUnavailableError(f"the native store does not open within {timeout_s:g} s")
    return result
