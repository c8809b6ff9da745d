# SPDX-License-Identifier: MIT
"""The evictor's program: a process of its own, as a thread would wait for the server's GIL at every file.

It needs the standard library only, and is started by `service` with

- a JSON object as its argument: `root`, `size_bytes` and `share` (of a `Capacity`), `tick_s`;
- the lock file of the root, locked, among its descriptors: the lock is held for as long as it lives;
- stdin: anything written to it means that there is news; the end of it, that the server is gone;
- stdout: a `Run` as JSON on each line, for the server's log and counters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import sys

from ucm.store.options import Capacity
from ucm.store.posix.capacity.evictor import Evictor, Run

# Behind the server, but not starved by it: otherwise the disk fills up.
_NICENESS = 10
_STDIN, _STDOUT = 0, 1


class _ServerGoneError(Exception):
    """Nobody is there to work for any more."""


def main(argument: str) -> None:
    """Evict until the server has gone."""
    settings = json.loads(argument)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    capacity = Capacity(settings["size_bytes"], settings["share"])
    try:
        _serve(settings["root"], capacity, settings["tick_s"])
    except (_ServerGoneError, BrokenPipeError):
        pass
    except Exception as exc:  # A fault of our own: the server tells of it, and starts another evictor.
        _tell(Run(problem=f"{type(exc).__name__}: {exc}"))
        raise


def _serve(root: str, capacity: Capacity, tick_s: float) -> None:
    parent = os.getppid()

    def wait(timeout_s: float) -> None:
        ready, _, _ = select.select([_STDIN], [], [], timeout_s)
        if (ready and not os.read(_STDIN, 4096)) or os.getppid() != parent:
            raise _ServerGoneError

    evictor = None
    while True:
        try:
            evictor = evictor or Evictor(root, capacity, lambda: wait(0.0))
            run = evictor.step()
        except OSError as exc:
            run = Run(problem=f"{exc.filename or root}: {exc.strerror}")
            if isinstance(exc, FileNotFoundError):
                evictor = None  # Somebody has removed the directory; begin anew.
        if run is not None:
            _tell(run)
        wait(tick_s)


def _tell(run: Run) -> None:
    os.write(_STDOUT, json.dumps(dataclasses.asdict(run)).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
