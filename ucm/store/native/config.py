# SPDX-License-Identifier: MIT
"""NativeStoreConfig: the options of a store of UCM's own package."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.store.errors import StoreConfigError
from ucm.store.options import as_int, as_text
from ucm.store.posix.config import OPTION_NAMES, PosixStoreConfig
from ucm.store.posix.layout import SHARD_HEX_DIGITS

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

PIPELINE_CONNECTOR = "UcmPipelineStore"
FILE_PIPELINE = "Posix"

# The page decides the sizes, and our deadlines do not depend on the native one.
_SET_BY_US = ("block_size", "shard_size", "tensor_size", "timeout_ms")
# Of the embedded store's options, those that mean the same here.
_OWN_OPTIONS = frozenset(
    {
        "accept_unverified",
        "dump_timeout_s",
        "io_threads",
        "load_timeout_s",
        "lookup_timeout_s",
        "storage_backends",
    }
)
_DEFAULTS: Mapping[str, object] = {
    # Below zero the native store only answers lookups.
    "device_id": 0,
    # One failed call would make the store refuse everything for five minutes.
    "store_health": {"passive_enabled": False},
    # By default hundreds of threads a store; more than our workers can use.
    "posix_data_trans_concurrency": 8,
    "posix_lookup_concurrency": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStoreConfig:
    """Options of a native store.

    Args:
        connector_name: What UCM's factory calls the store.
        module_path: Module of UCM's package that has it; None if the factory knows it.
        package: Directory of UCM's package; None if Python finds it anyway.
        options: What UCM's store is told, but for sizes and directories.
        own: Deadlines and the like.
        storage_backends: The directory of a store that keeps plain files; else
            whatever directories there are, for the identity records.
    """

    connector_name: str
    module_path: str | None
    package: str | None
    options: Mapping[str, object]
    own: PosixStoreConfig
    storage_backends: tuple[str, ...]

    @classmethod
    def from_mapping(
        cls, connector_name: str, module_path: str | None, raw: Mapping[str, object]
    ) -> NativeStoreConfig:
        """Parse user settings; what is not known here is left to UCM's store.

        Raises:
            StoreConfigError: A value is wrong, or one that cannot work with stored blocks.
        """
        options = dict(raw)
        ours = {name: options.pop(name) for name in sorted(OPTION_NAMES & options.keys())}
        if foreign := sorted(ours.keys() - _OWN_OPTIONS):
            raise StoreConfigError(f"option {foreign[0]!r} does not work with engine 'native'; leave it out")
        package = options.pop("native_package", None)
        overridden = [name for name in _SET_BY_US if options.pop(name, None) is not None]
        if overridden:
            logger.warning("these options of the native store are set for it: %s", ", ".join(overridden))
        options = {**_DEFAULTS, **options}
        if connector_name == PIPELINE_CONNECTOR:
            options.setdefault("store_pipeline", FILE_PIPELINE)
        # Direct I/O cannot store a page that is no multiple of the disk's sectors, and most are not.
        options.setdefault("io_direct", False)
        # Without a directory any will do, to have the other options checked.
        own = PosixStoreConfig.from_mapping({"storage_backends": "/", **ours})
        config = cls(
            connector_name=connector_name,
            module_path=module_path,
            package=None if package is None else as_text("native_package", package),
            options=options,
            own=own,
            storage_backends=own.storage_backends if "storage_backends" in ours else (),
        )
        if config.keeps_plain_files:
            config._check_files()
        return config

    @property
    def keeps_plain_files(self) -> bool:
        """Every block is one file below the storage root, as the embedded store would have it."""
        return (
            self.connector_name == PIPELINE_CONNECTOR and self.options.get("store_pipeline") == FILE_PIPELINE
        )

    def _check_files(self) -> None:
        if len(self.storage_backends) != 1:
            raise StoreConfigError(
                f"option 'storage_backends' is {list(self.storage_backends)}; expected one directory: "
                "the native store spreads blocks over several in a way of its own"
            )
        name = "data_dir_shard_bytes"
        # Both stores must find the same files.
        as_int(name, self.options.get(name, SHARD_HEX_DIGITS), SHARD_HEX_DIGITS, SHARD_HEX_DIGITS)
