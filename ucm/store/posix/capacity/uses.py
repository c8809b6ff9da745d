# SPDX-License-Identifier: MIT
"""What a process tells the evictor of a storage root: the blocks it wrote and the blocks it used.

    <root>/.ucm/capacity/<writer>.uses    JSON, renamed into place, removed by the evictor once read

A block's last use is its file's modification time. A writer leaves it to the file system; a use moves it
to the end of the minute in which it happened. So whatever was written or used together within a minute is
of one age, whichever process or pool it belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ucm.store.interface import BlockKey
from ucm.store.posix.layout import TEMP_DIRECTORY
from ucm.store.posix.writer import new_writer_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.store.posix.layout import BlockLayout

MINUTE_NS = 60_000_000_000
DIRECTORY = ".ucm/capacity"
_SUFFIX = ".uses"
# Beyond these nobody can be reading, and the evictor's next scan finds what it is not told.
_MAX_PENDING_KEYS = 200_000
_MAX_PENDING_MINUTES = 5
_MAX_FILES = 2_000


class Written(NamedTuple):
    """Blocks of one namespace that were written: their file size, and their keys."""

    file_bytes: int
    keys: list[BlockKey]


class Uses(NamedTuple):
    """What one file tells.

    Args:
        written: By namespace.
        used: By the end of the minute, in nanoseconds since the epoch, and namespace.
    """

    written: dict[str, Written]
    used: dict[int, dict[str, list[BlockKey]]]


class UseLog:
    """One store's blocks written and used since they were last published; cheap to add to, from any thread.

    Args:
        layout: The store's.
        namespace: The store's.
        file_bytes: Size of its block files.
        on_written: Called with the number of bytes that were written.
    """

    def __init__(
        self, layout: BlockLayout, namespace: str, file_bytes: int, on_written: Callable[[int], None]
    ) -> None:
        self.namespace = namespace
        self.layout = layout
        self.file_bytes = file_bytes
        self._on_written = on_written
        self._lock = threading.Lock()
        self._written: set[BlockKey] = set()
        self._used: dict[int, set[BlockKey]] = {}

    def written(self, keys: Sequence[BlockKey]) -> None:
        """Note blocks that were written just now."""
        with self._lock:
            if len(self._written) < _MAX_PENDING_KEYS:
                self._written.update(keys)
        if keys:
            self._on_written(len(keys) * self.file_bytes)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Note blocks that were used just now."""
        minute = time.time_ns() // MINUTE_NS
        with self._lock:
            pending = self._used.setdefault(minute, set())
            if len(pending) < _MAX_PENDING_KEYS and len(self._used) <= _MAX_PENDING_MINUTES:
                pending.update(keys)

    def take(self) -> tuple[set[BlockKey], dict[int, set[BlockKey]]]:
        """Return and forget what was written, and what was used by minute."""
        with self._lock:
            taken = self._written, self._used
            self._written, self._used = set(), {}
        return taken


def publish(roots: Sequence[str], logs: Sequence[UseLog]) -> list[str]:
    """Tell the evictor of every root its share of the logs; return the roots where there was any.

    Raises:
        OSError: A root cannot be written; what was to be told there is lost.
    """
    news = {root: Uses({}, defaultdict(dict)) for root in roots}
    for log in logs:
        written, used = log.take()
        for root, keys in _by_root(log, written).items():
            news[root].written[log.namespace] = Written(log.file_bytes, keys)
        for minute, minute_keys in used.items():
            for root, keys in _by_root(log, minute_keys).items():
                together = news[root].used[(minute + 1) * MINUTE_NS - 1]
                together[log.namespace] = [*together.get(log.namespace, []), *keys]
    told = [root for root, uses in news.items() if uses.written or uses.used]
    failures = []
    for root in told:
        try:
            _write(f"{root}/{DIRECTORY}", news[root])
        except OSError as exc:  # noqa: PERF203 -- one root's failure is no other's.
            failures.append(exc)
    if failures:
        raise failures[0]
    return told


def collect(root: str) -> Iterator[Uses]:
    """Yield what all processes have told since the last call; and remove it.

    Raises:
        OSError: The directory cannot be read.
    """
    directory = f"{root}/{DIRECTORY}"
    for name in os.listdir(directory):
        if not name.endswith(_SUFFIX):
            continue
        path = f"{directory}/{name}"
        uses = _read(path)
        # Gone before it is dealt with: one that brings the evictor down does so once. A scan makes up for it.
        with contextlib.suppress(OSError):
            os.unlink(path)
        if uses is not None:
            yield uses


def _by_root(log: UseLog, keys: set[BlockKey]) -> dict[str, list[BlockKey]]:
    roots = log.layout.roots
    parts: dict[str, list[BlockKey]] = defaultdict(list)
    for key in keys:
        parts[roots[log.layout.root_index(key)]].append(key)
    return parts


def _write(directory: str, uses: Uses) -> None:
    os.makedirs(f"{directory}/{TEMP_DIRECTORY}", exist_ok=True)
    if len(os.listdir(directory)) > _MAX_FILES:
        return
    document = {
        "written": {
            namespace: [written.file_bytes, [key.hex() for key in written.keys]]
            for namespace, written in uses.written.items()
        },
        "used": {
            str(until_ns): {namespace: [key.hex() for key in keys] for namespace, keys in together.items()}
            for until_ns, together in uses.used.items()
        },
    }
    name = new_writer_name()
    temp = f"{directory}/{TEMP_DIRECTORY}/uses.{name}"
    with open(temp, "w", encoding="ascii") as file:
        json.dump(document, file)
    os.rename(temp, f"{directory}/{name}{_SUFFIX}")


def _read(path: str) -> Uses | None:
    """Return what a file tells; None if it is damaged or gone."""
    try:
        with open(path, encoding="ascii") as file:
            document = json.load(file)
        return Uses(
            {
                namespace: Written(int(size), _keys(keys))
                for namespace, (size, keys) in document["written"].items()
            },
            {
                int(until_ns): {namespace: _keys(keys) for namespace, keys in together.items()}
                for until_ns, together in document["used"].items()
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keys(names: Sequence[str]) -> list[BlockKey]:
    return [BlockKey(bytes.fromhex(name)) for name in names]
