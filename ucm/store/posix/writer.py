# SPDX-License-Identifier: MIT
"""Names for files in preparation, and the removal of those whose writer has died."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Far beyond any dump deadline: a file this old is nobody's, whatever machine its writer was on.
_ORPHAN_AGE_S = 3600.0
# More than a crash leaves behind; the rest waits for the next start.
_MAX_REMOVALS = 10_000

_sequence = itertools.count()


def new_writer_name() -> str:
    """Return a name no other file in preparation has, on any machine: `<place>-<pid>-<random>-<n>`."""
    return f"{_place()}-{os.getpid()}-{_token()}-{next(_sequence)}"


def remove_orphans(directory: str) -> int:
    """Remove the files in preparation whose writers are gone; return how many."""
    removed = 0
    for path in find_orphans(directory):
        with contextlib.suppress(OSError):
            os.unlink(path)
            removed += 1
    return removed


def find_orphans(directory: str) -> Iterator[str]:
    """Yield the files in preparation whose writers are gone.

    A writer on this machine and in this PID namespace is asked for by its process
    id. Any other is gone when its file is an hour old, by the clock that dates the files:
    this machine's may be wrong.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    if not names:
        return
    os.utime(directory)
    now = os.stat(directory).st_mtime
    for name in names[:_MAX_REMOVALS]:
        path = f"{directory}/{name}"
        is_orphan = False
        with contextlib.suppress(OSError):
            is_orphan = _is_orphan(path, name, now)
        if is_orphan:
            yield path


def _is_orphan(path: str, name: str, now: float) -> bool:
    place, _, rest = name.rpartition(".")[2].partition("-")
    pid = rest.partition("-")[0]
    if place == _place() and pid.isdecimal():
        return not _is_alive(int(pid))
    return now - os.stat(path).st_mtime > _ORPHAN_AGE_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _place() -> str:
    """Return what must be equal for a process id to mean the same process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot[:8]}{os.stat('/proc/self/ns/pid').st_ino:x}"


@cache
def _token() -> str:
    return secrets.token_hex(4)
