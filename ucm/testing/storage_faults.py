# SPDX-License-Identifier: MIT
"""The fault matrix: storage that really fails, and gets well again.

Each fault is a row of docs/faults.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from ucm.testing.fuse_mount import FaultyMount, faulty_mount
from ucm.testing.mounts import mounted, remount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

_TMPFS_BYTES = 4 * 1024 * 1024
_FILE_LIMIT_BYTES = 4096
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which storage goes wrong for a while.

    Attributes:
        name: What happens.
        ready: Takes an empty directory and gives what is to happen, while the context lasts, to the
            storage root in it.
        says: What the log says meanwhile, as a regular expression; empty if there is nothing to tell.
        loses: What was stored before may be gone afterwards.
    """

    name: str
    ready: Callable[[Path], AbstractContextManager[Strike]]
    says: str = ""
    loses: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Strike:
    """A storage root and what can happen to it.

    Attributes:
        root: Where to store.
        begin: The fault lasts as long as the context; may be used again.
    """

    root: Path
    begin: Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def _full(directory: Path, room: int) -> Iterator[Strike]:
    with mounted("tmpfs", directory / "disk", options=f"size={_TMPFS_BYTES}"):

        @contextlib.contextmanager
        def begin() -> Iterator[None]:
            ballast = directory / "disk/ballast"
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            os.truncate(ballast, ballast.stat().st_size - room)
            yield
            ballast.unlink()

        yield Strike(directory / "disk/kv", begin)


@contextlib.contextmanager
def _read_only(directory: Path) -> Iterator[Strike]:
    with mounted("tmpfs", directory / "disk"):

        @contextlib.contextmanager
        def begin() -> Iterator[None]:
            remount(directory / "disk", "ro")
            yield
            remount(directory / "disk", "rw")

        yield Strike(directory / "disk/kv", begin)


@contextlib.contextmanager
def _limited(directory: Path, limit: int, value: Callable[[], int]) -> Iterator[Strike]:
    @contextlib.contextmanager
    def begin() -> Iterator[None]:
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value(), hard))
        try:
            yield
        finally:
            resource.setrlimit(limit, (soft, hard))

    yield Strike(directory / "kv", begin)


def _first_free_descriptor() -> int:
    descriptor = os.open("/", os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@contextlib.contextmanager
def _removed(directory: Path, *patterns: str) -> Iterator[Strike]:
    @contextlib.contextmanager
    def begin() -> Iterator[None]:
        for path in [path for pattern in patterns for path in directory.glob(pattern)]:
            shutil.rmtree(path)
        yield

    yield Strike(directory / "kv", begin)


@contextlib.contextmanager
def _failing(directory: Path, error: int, *operations: str) -> Iterator[Strike]:
    with faulty_mount(directory / "mount") as mount:

        @contextlib.contextmanager
        def begin() -> Iterator[None]:
            for operation in operations:
                mount.fail(operation, error, "/kv")
            yield
            mount.heal()

        yield Strike(mount.path / "kv", begin)


@contextlib.contextmanager
def _hanging(directory: Path, *operations: str) -> Iterator[Strike]:
    with faulty_mount(directory / "mount") as mount:

        @contextlib.contextmanager
        def begin() -> Iterator[None]:
            for operation in operations:
                mount.hang(operation, "/kv")
            yield
            mount.heal()

        yield Strike(mount.path / "kv", begin)


@contextlib.contextmanager
def _stopped(directory: Path) -> Iterator[Strike]:
    with faulty_mount(directory / "mount") as mount:

        @contextlib.contextmanager
        def begin() -> Iterator[None]:
            mount.stop()
            try:
                yield
            finally:
                mount.resume()

        yield Strike(mount.path / "kv", begin)


@contextlib.contextmanager
def _dead(directory: Path) -> Iterator[Strike]:
    mounts = [FaultyMount(directory / "mount")]

    @contextlib.contextmanager
    def begin() -> Iterator[None]:
        mounts[-1].die()
        yield
        mounts[-1].close()
        mounts.append(FaultyMount(directory / "mount"))

    try:
        yield Strike(directory / "mount/kv", begin)
    finally:
        mounts[-1].close()


@contextlib.contextmanager
def _unmounted(directory: Path) -> Iterator[Strike]:
    """Hide the storage behind an empty file system, as if its own were gone, and give it back."""
    (directory / "kv").mkdir()

    @contextlib.contextmanager
    def begin() -> Iterator[None]:
        with mounted("tmpfs", directory / "kv"):
            yield

    yield Strike(directory / "kv", begin)


@contextlib.contextmanager
def _wrong_clock(directory: Path, jump_s: float) -> Iterator[Strike]:
    right_time = time.time

    def wrong_time() -> float:
        return right_time() + jump_s

    yield Strike(directory / "kv", lambda: mock.patch("time.time", wrong_time))


def _fault(
    name: str,
    ready: Callable[..., AbstractContextManager[Strike]],
    *arguments: object,
    says: str = "",
    loses: bool = False,
) -> Fault:
    return Fault(name, lambda directory: ready(directory, *arguments), says, loses)


FAULTS = (
    _fault("disk full", _full, 0, says="ENOSPC"),
    _fault("disk full in mid-batch", _full, 32_768, says="ENOSPC"),
    _fault("file size limit", _limited, resource.RLIMIT_FSIZE, lambda: _FILE_LIMIT_BYTES, says="EFBIG"),
    _fault("no more descriptors", _limited, resource.RLIMIT_NOFILE, _first_free_descriptor, says="EMFILE"),
    _fault("quota", _failing, errno.EDQUOT, "write", says="EDQUOT"),
    _fault("quota told at close", _failing, errno.EDQUOT, "flush", says="EDQUOT"),
    _fault("read-only", _read_only, says="EROFS"),
    _fault("permission denied", _failing, errno.EACCES, "*", says="EACCES"),
    _fault("shard directories removed", _removed, "kv/[0-9a-f]??", "kv/sglang_v2/*/???", loses=True),
    _fault("namespaces removed", _removed, "kv/sglang_v2", loses=True),
    _fault("root removed", _removed, "kv", loses=True),
    _fault("another file system in its place", _unmounted),
    _fault("reading fails", _failing, errno.EIO, "read", says="EIO"),
    _fault("writing fails", _failing, errno.EIO, "write", says="EIO"),
    _fault("renaming fails", _failing, errno.EIO, "rename", "rename2", says="EIO"),
    _fault("everything fails", _failing, errno.EIO, "*", says="EIO"),
    _fault("stale handles", _failing, errno.ESTALE, "*", says="ESTALE"),
    _fault("reading hangs", _hanging, "read", says="no answer within 1 s"),
    _fault("writing hangs", _hanging, "write", says="no answer within 1 s"),
    _fault("everything hangs", _stopped, says="no answer within 1 s"),
    _fault("file system dies and is mounted anew", _dead, says="ENOTCONN", loses=True),
    _fault("clock a day ahead", _wrong_clock, _DAY_S),
    _fault("clock a day behind", _wrong_clock, -_DAY_S),
)
