# SPDX-License-Identifier: MIT
"""Blocks that were last used a while ago, for tests of eviction."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import key_of, outgoing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ucm.store import KVStore, StoreSpec

MINUTE_S = 60.0
# One instant for all blocks of a process: none is a minute younger because a minute has just ended.
_NOW_S = time.time()


def dump_aged(store: KVStore, storage: Path, numbers: Sequence[int], minutes_ago: float) -> None:
    """Store blocks and make them look as if that had happened so many minutes ago."""
    store.dump(outgoing(numbers, store.spec))
    age(storage, store.spec, numbers, minutes_ago)


def age(storage: Path, spec: StoreSpec, numbers: Iterable[int], minutes_ago: float) -> None:
    """Move the last use of stored blocks to the middle of a minute in the past."""
    minute = (_NOW_S - minutes_ago * MINUTE_S) // MINUTE_S * MINUTE_S + MINUTE_S / 2
    for number in numbers:
        os.utime(block_path(storage, spec, key_of(number)), (minute, minute))
