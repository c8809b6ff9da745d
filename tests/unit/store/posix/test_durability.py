# SPDX-License-Identifier: MIT
"""What is flushed when, and what is there after a power loss."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.durability import Durability
from ucm.store.posix.store import PosixStore
from ucm.testing.mounts import make_disk, mounted
from ucm.testing.posix_faults import block_path, faulty_call
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    FAILED,
    MISSING,
    SPEC,
    key_of,
    load,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = pytest.mark.parametrize("durability", Durability, ids=lambda durability: durability.value)


def open_store(storage: Path, durability: Durability) -> PosixStore:
    return PosixStore(SPEC, PosixStoreConfig((str(storage),), durability=durability, dump_timeout_s=60))


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """The calls of a dump that count, with the file of each, in their order."""
    calls: list[tuple[str, Path]] = []

    def traced(name: str) -> Callable[..., object]:
        original = getattr(os, name)

        def call(target: int | str, *args: object) -> object:
            file = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
            calls.append((name, file))
            return original(target, *args)

        return call

    for name in ("pwritev", "fsync", "fdatasync", "rename"):
        monkeypatch.setattr(os, name, traced(name))
    return calls


@ALL
def test_each_mode_flushes_what_it_promises_and_nothing_else(
    tmp_path: Path, trace: list[tuple[str, Path]], durability: Durability
) -> None:
    store = open_store(tmp_path, durability)
    shard = block_path(tmp_path, SPEC, key_of(1)).parent
    shard.mkdir()
    trace.clear()
    assert store.dump(outgoing([1])) == [DONE]
    store.close()

    temp = trace[0][1]
    assert temp.parent.name == ".tmp"
    before = [] if durability is Durability.NONE else [("fdatasync", temp)]
    after = [("fsync", shard)] if durability is Durability.FULL else []
    assert trace == [("pwritev", temp), *before, ("rename", temp), *after]


def test_full_also_flushes_the_directories_in_which_it_made_one(
    tmp_path: Path, trace: list[tuple[str, Path]]
) -> None:
    store = open_store(tmp_path / "root", Durability.FULL)
    shard = block_path(tmp_path / "root", SPEC, key_of(1)).parent
    trace.clear()
    assert store.dump(outgoing([1])) == [DONE]
    store.close()

    flushed = [file for name, file in trace if name == "fsync"]
    assert flushed == [shard.parent, shard]


@pytest.mark.parametrize("durability", [Durability.DATA, Durability.FULL])
def test_a_block_that_cannot_be_flushed_is_not_stored(tmp_path: Path, durability: Durability) -> None:
    store = open_store(tmp_path, durability)

    def broken(*_args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with faulty_call("fdatasync", key_of(1).hex(), broken):
        assert store.dump(outgoing([1, 2])) == [FAILED, DONE]
    assert store.lookup([key_of(1), key_of(2)]) == [False, True]
    assert list(tmp_path.glob("**/.tmp/*")) == []
    store.close()


@ALL
def test_after_a_power_loss_there_is_what_the_mode_promises_and_never_a_wrong_byte(
    tmp_path: Path, durability: Durability
) -> None:
    # What the kernel has written to the disk by now is all that a power loss leaves.
    disk, after = tmp_path / "disk", tmp_path / "after"
    make_disk(disk, megabytes=32)
    numbers = list(range(30))
    with mounted("ext4", tmp_path / "live", source=str(disk), options="loop,commit=300"):
        store = open_store(tmp_path / "live/kv", durability)
        store.dump(outgoing([100]))
        os.sync()
        assert store.dump(outgoing(numbers)) == [DONE] * len(numbers)
        shutil.copyfile(disk, after)
        store.close()
    with mounted("ext4", tmp_path / "again", source=str(after), options="loop"):
        store = open_store(tmp_path / "again/kv", durability)
        statuses, memory = load(store, numbers)
        for number, status, guarded in zip(numbers, statuses, memory, strict=True):
            assert status is not DONE or guarded.payload == payload_of(number)
        store.close()
    possible = {
        Durability.NONE: {MISSING, CORRUPT},  # As the disk was not told to write anything yet.
        Durability.DATA: {MISSING, DONE},
        Durability.FULL: {DONE},
    }
    assert set(statuses) <= possible[durability]
