# SPDX-License-Identifier: MIT
"""EvictorSupervisor: keeps an evictor running on one storage root, whichever process it belongs to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.posix.capacity.evictor import Run
from ucm.store.posix.capacity.uses import DIRECTORY

if TYPE_CHECKING:
    from ucm.store.options import Capacity

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
_MOST_REPORT_BYTES = 1024 * 1024
# The same `ucm` as here, and nothing of the environment; `-S` keeps other packages' start-up code out.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from ucm.store.posix.capacity.process import main; main(sys.argv[2])"
)
_SEARCH_PATH = str(Path(__file__).resolve().parents[4])


class EvictorSupervisor:
    """Starts the evictor of one storage root where no process has one; it ends with this process.

    Args:
        root: The storage root.
        capacity: What its blocks may take.
        tick_s: How often the evictor looks around without being woken.
    """

    def __init__(self, root: str, capacity: Capacity, tick_s: float) -> None:
        self._root = root
        self._capacity = capacity
        self._tick_s = tick_s
        self._evictor: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._problem = ""

    @property
    def reports(self) -> int | None:
        """Descriptor that the evictor's reports are read from."""
        return self._evictor.stdout.fileno() if self._evictor and self._evictor.stdout else None

    def look_after(self) -> list[Run]:
        """Start the evictor unless there is one on this root; return what ours has reported."""
        if self._evictor is not None:
            lines = self._read()
            if self._evictor.poll() is None:
                return lines
            self.tell_problem(f"the evictor of {self._root} ended with status {self._evictor.returncode}")
            self._forget()
            return lines
        try:
            self._start()
        except OSError as exc:
            self.tell_problem(f"no evictor for {self._root}: {exc.strerror}")
        return []

    def wake(self) -> None:
        """Tell the evictor that there is news."""
        if self._evictor and self._evictor.stdin:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._evictor.stdin.fileno(), b"\n")

    def tell_problem(self, problem: str) -> None:
        """Warn of a problem, once for as long as it stays the same."""
        if problem != self._problem:
            logger.warning("capacity: %s", problem)
        self._problem = problem

    def close(self) -> None:
        """End the evictor."""
        if self._evictor is None:
            return
        if self._evictor.stdin:
            self._evictor.stdin.close()
        try:
            self._evictor.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._evictor.kill()  # Stuck in storage; it will end when that answers.
        self._forget()

    def _start(self) -> None:
        directory = f"{self._root}/{DIRECTORY}"
        os.makedirs(directory, exist_ok=True)
        descriptor = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            settings = {
                "root": self._root,
                "size_bytes": self._capacity.size_bytes,
                "share": self._capacity.share,
                "tick_s": self._tick_s,
            }
            self._evictor = subprocess.Popen(  # noqa: S603 -- our own program.
                [sys.executable, "-I", "-S", "-c", _PROGRAM, _SEARCH_PATH, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                pass_fds=[descriptor],  # The lock is the evictor's from here on.
            )
        except BlockingIOError:
            return  # Another process has it.
        finally:
            os.close(descriptor)
        for pipe in (self._evictor.stdin, self._evictor.stdout):
            if pipe:
                os.set_blocking(pipe.fileno(), False)

    def _read(self) -> list[Run]:
        descriptor = self.reports
        with contextlib.suppress(BlockingIOError):
            while descriptor is not None and (piece := os.read(descriptor, _MOST_REPORT_BYTES)):
                self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        return [Run(**json.loads(line)) for line in lines]

    def _forget(self) -> None:
        if self._evictor:
            for pipe in (self._evictor.stdin, self._evictor.stdout):
                if pipe:
                    pipe.close()
        self._evictor, self._unread = None, b""
