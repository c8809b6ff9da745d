# SPDX-License-Identifier: MIT
"""PosixStoreConfig: the options of the embedded store, parsed once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ucm.store.errors import StoreConfigError
from ucm.store.options import (
    Capacity,
    as_bool,
    as_capacity,
    as_choice,
    as_directories,
    as_int,
    as_seconds,
    reject_unknown,
)
from ucm.store.posix.durability import Durability
from ucm.store.posix.reading import IoMode

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_IO_THREADS = 16


@dataclass(frozen=True, slots=True)
class PosixStoreConfig:
    """Options of a PosixStore.

    Args:
        storage_backends: Storage roots, absolute. Blocks are spread over them by
            key, so every process must name them in the same order.
        io_threads: Worker threads of the engine that all stores of a process
            share; if stores ask for different numbers, the largest counts.
        load_timeout_s: After this time a load returns with what it has.
        dump_timeout_s: The same for a dump, a delete, each step of a scan, and opening
            the store.
        lookup_timeout_s: The same for a lookup.
        accept_unverified: Whether a file that is exactly a payload, as UCM's native store
            writes it, is a block. It has neither checksum nor identity: name and size
            are all there is to know it by.
        durability: What of a block survives a power loss: `none`, `data` or `full`.
        io_mode: How blocks are read: `auto`, `buffered` or `direct`.
        capacity_bytes: What the blocks below each root may take together before those
            not used for longest are evicted; None: nothing is ever evicted.
    """

    storage_backends: tuple[str, ...]
    io_threads: int = 8
    load_timeout_s: float = 5.0
    dump_timeout_s: float = 30.0
    lookup_timeout_s: float = 2.0
    accept_unverified: bool = True
    durability: Durability = Durability.NONE
    io_mode: IoMode = IoMode.AUTO
    capacity_bytes: Capacity | None = None

    def __post_init__(self) -> None:
        parsed: dict[str, object] = {
            "storage_backends": as_directories("storage_backends", self.storage_backends),
            "io_threads": as_int("io_threads", self.io_threads, 1, MAX_IO_THREADS),
            "load_timeout_s": as_seconds("load_timeout_s", self.load_timeout_s),
            "dump_timeout_s": as_seconds("dump_timeout_s", self.dump_timeout_s),
            "lookup_timeout_s": as_seconds("lookup_timeout_s", self.lookup_timeout_s),
            "accept_unverified": as_bool("accept_unverified", self.accept_unverified),
            "durability": as_choice("durability", self.durability, Durability),
            "io_mode": as_choice("io_mode", self.io_mode, IoMode),
            "capacity_bytes": as_capacity("capacity_bytes", self.capacity_bytes),
        }
        for name, value in parsed.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> PosixStoreConfig:
        """Parse user settings.

        Raises:
            StoreConfigError: A key is unknown or missing, or a value is wrong.
        """
        reject_unknown(raw, OPTION_NAMES, "store option")
        if "storage_backends" not in raw:
            raise StoreConfigError(
                "store option 'storage_backends' is required: the directory to keep blocks in"
            )
        return cls(**raw)  # type: ignore[arg-type]  # __post_init__ checks every value.


OPTION_NAMES = frozenset(field.name for field in fields(PosixStoreConfig))
