# SPDX-License-Identifier: MIT
"""A contestant in a process of its own.

Stores bring threads, packages and memory of their own: apart, none disturbs another, and what each
costs can be told. The parent names a method and its arguments in one line of JSON, the other process answers
in one. Memory, timing and checks are the other process's.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pairs import Contestant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parent.parent


class RemoteError(Exception):
    """The process of `contestant` has ended; the message is the last line that it wrote."""

    def __init__(self, contestant: str, reason: str) -> None:
        super().__init__(f"{contestant}: {reason}")
        self.contestant = contestant


class RemoteContestant(Contestant):
    """The parent's side: asks the other process, which takes the time.

    Args:
        name: Of the contestant.
        module: What the other process runs; its `main` calls `serve`.
        arguments: For it; the descriptor to serve on comes after them.
        environment: Of the process.

    Raises:
        RemoteError: Of every method: the other process has failed.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        near, far = socket.socketpair()
        with near, far:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments, str(far.fileno())],
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=[far.fileno()],
                env=environment,
            )
            self._stream = near.makefile("rw")

    @property
    def pid(self) -> int:
        """Of the other process."""
        return self._process.pid

    def call(self, method: str, *arguments: object) -> Any:
        """Have the other process call a method of its contestant."""
        try:
            self._stream.write(json.dumps([method, *arguments]) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RemoteError(self.name, self._last_words())
        return json.loads(line)

    def timed(self, phase: str, round_number: int) -> float:
        """Have one phase done."""
        return float(self.call("timed", phase, round_number))

    def finish(self, round_number: int) -> None:
        """Have the round's data removed."""
        self.call("finish", round_number)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # What it did not live to read.
            self._stream.close()
        self._log.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"status {self._process.returncode}"


def serve(contestant: object, descriptor: int) -> None:
    """Do what the parent asks until it goes away; an error ends the process."""
    with socket.socket(fileno=descriptor).makefile("rw") as stream:
        for line in stream:
            method, *arguments = json.loads(line)
            stream.write(json.dumps(getattr(contestant, method)(*arguments)) + "\n")
            stream.flush()
