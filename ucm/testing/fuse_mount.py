# SPDX-License-Identifier: MIT
"""FaultyMount: a mounted file system that really fails, really hangs, or dies."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.testing import fuse_server

if TYPE_CHECKING:
    from collections.abc import Iterator

_DETACH = 2  # MNT_DETACH


class FaultyMount:
    """A FUSE file system in memory; its server is a process of its own.

    What a caller sees comes from the kernel, in the middle of its own system call.

    Args:
        target: Where to mount it; made if needed.
    """

    def __init__(self, target: Path) -> None:
        self.path = target
        target.mkdir(parents=True, exist_ok=True)
        try:
            device = os.open("/dev/fuse", os.O_RDWR)
        except OSError as exc:
            pytest.skip(f"there is no FUSE: {exc}")
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        failed = libc.mount(b"faulty", os.fsencode(target), b"fuse", 0, options.encode())
        if failed:
            os.close(device)
            pytest.skip(f"cannot mount with FUSE: {os.strerror(ctypes.get_errno())}")
        command = [sys.executable, "-I", "-S", str(Path(fuse_server.__file__)), str(device)]
        self._server = subprocess.Popen(  # noqa: S603 -- our own code.
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[device]
        )
        os.close(device)
        self._faults: list[dict[str, object]] = []
        self.heal()  # Returns once the server is up.

    def fail(self, operation: str, error: int, file: str = "") -> None:
        """Answer an operation of the FUSE protocol ("*": all) with an errno, on paths with `file` in them."""
        self._set([*self._faults, {"operation": operation, "error": error, "file": file}])

    def hang(self, operation: str, file: str = "") -> None:
        """Do not answer `operation` until `heal`; then it goes on."""
        self._set([*self._faults, {"operation": operation, "error": "hang", "file": file}])

    def heal(self) -> None:
        """Work again."""
        self._set([])

    def stop(self) -> None:
        """Answer nothing at all, until `resume`."""
        self._server.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `stop`."""
        self._server.send_signal(signal.SIGCONT)

    def die(self) -> None:
        """End the server while the file system is mounted: every call fails from now on."""
        self._server.kill()
        self._server.wait()

    def close(self) -> None:
        """Unmount; what hangs fails."""
        ctypes.CDLL(None).umount2(os.fsencode(self.path), _DETACH)
        self.die()
        for pipe in (self._server.stdin, self._server.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None  # noqa: S101 -- as asked for.
                pipe.close()

    def _set(self, faults: list[dict[str, object]]) -> None:
        self._faults = faults
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None  # noqa: S101 -- as asked for.
        assert stdout is not None  # noqa: S101 -- as asked for.
        stdin.write(json.dumps(faults) + "\n")
        stdin.flush()
        assert stdout.readline() == "ready\n"  # noqa: S101 -- test support.


@contextlib.contextmanager
def faulty_mount(target: Path) -> Iterator[FaultyMount]:
    """Mount a `FaultyMount` for a while; skips the test where nobody may."""
    mount = FaultyMount(target)
    try:
        yield mount
    finally:
        mount.close()
