# SPDX-License-Identifier: MIT
"""Start an SGLang server on this platform, wait until it serves, and end it: for tests, demos and scripts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_cpu import PLATFORM_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_POLL_S = 0.25
_REPORT_EVERY_S = 5.0
_TAIL_LINES = 40

_FLAGS_BY_MODEL_TYPE = {
    # Checkpoints of the linear attention state need extra slots, and a page as long as their distance.
    # Without a limit the state pool takes gigabytes.
    "qwen3_5_text": (
        *("--page-size", "64"),
        *("--max-mamba-cache-size", "64"),
        *("--mamba-radix-cache-strategy", "extra_buffer"),
    ),
    # As many tokens in the sliding window pool as in the others: a tiny pool cannot give up a share.
    "deepseek_v4": ("--swa-full-tokens-ratio", "1.0"),
}


class ServerFailedError(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """The address of its HTTP interface, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def alive(self) -> list[int]:
        """Return the ids of the server's processes that have not ended, its children included."""
        return [entry.pid for entry in _processes() if entry.group == self.process.pid and not entry.is_dead]

    def stop(self, request: signal.Signals = signal.SIGINT, grace_s: float = 15.0) -> None:
        """Ask the server to end; after `grace_s` seconds, kill what is left. Returns when nothing is left.

        SIGINT takes about a second. SIGTERM drains running requests first, and takes at least five.
        """
        if self.process.poll() is None:
            self.process.send_signal(request)
        deadline = time.monotonic() + grace_s
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)
        self.kill()

    def kill(self) -> None:
        """End every process of the server at once, as a crash would. Returns when nothing is left."""
        while self.alive():
            os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(_POLL_S / 5)
        self.process.wait()


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    is_dead: bool  # A zombie: it ended, and its parent has not noticed.


def _processes() -> Iterator[_Process]:
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            stat = (directory / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # It ended in the meantime.
        # The name in parentheses may hold anything, spaces and parentheses included.
        state, parent, group = stat.rpartition(")")[2].split()[:3]
        yield _Process(int(directory.name), int(parent), int(group), state in "ZX")


def free_port() -> int:
    """Return a TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(model_path: Path | str, port: int, *extra_args: str) -> list[str]:
    """Return the command line of a server for a model directory.

    Contains what this platform needs, and for the families it knows what their tiny models need. `extra_args`
    come last, so they win over both.
    """
    arguments = ["--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--device", "cpu", "--max-total-tokens", "8192"]
    if not any(Path(model_path).glob("tokenizer*")):
        arguments.append("--skip-tokenizer-init")
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    arguments += _FLAGS_BY_MODEL_TYPE.get(config["model_type"], ())
    return [str(Path(sys.executable).with_name("sglang")), "serve", *arguments, *extra_args]


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a server on this platform: `base` with the switches that select it."""
    return {
        # Threads that wait for each other make the small operations of a tiny model many times slower.
        "OMP_NUM_THREADS": "1",
        **base,
        "SGLANG_PLATFORM": PLATFORM_NAME,
        # SGLang's own CPU engine needs a build of its kernels that no registry has.
        "SGLANG_USE_CPU_ENGINE": "0",
        # SGLang asks torch for CUDA in many places, also on other platforms.
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def running_server(
    model_path: Path | str,
    *extra_args: str,
    log: Path,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 300.0,
) -> Iterator[Server]:
    """Run a server for the length of a `with` block, in a process group of its own.

    Args:
        model_path: Directory of the model.
        *extra_args: More command line, see `command`.
        log: File for the server's output; replaced.
        port: TCP port; a free one if None.
        env: Complete environment; `environment()` if None.
        deadline_s: How long the server may take until it answers. Progress goes to stderr every five seconds.

    Yields:
        The server, once its health check succeeds. It has ended, with its children, when the block is left.

    Raises:
        ServerFailedError: It died or did not answer in time.
    """
    port = free_port() if port is None else port
    with running_command(
        command(model_path, port, *extra_args),
        log=log,
        port=port,
        env=environment() if env is None else env,
        deadline_s=deadline_s,
    ) as server:
        yield server


@contextmanager
def running_command(
    command_line: Sequence[str],
    *,
    log: Path,
    port: int,
    env: Mapping[str, str],
    deadline_s: float = 300.0,
) -> Iterator[Server]:
    """Run a server of any platform like `running_server`, by its whole command line and environment."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the command is the caller's.
            list(command_line),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        _wait_until_healthy(server, deadline_s)
        yield server
    finally:
        server.stop()


def _wait_until_healthy(server: Server, deadline_s: float) -> None:
    start = time.monotonic()
    next_report = start + _REPORT_EVERY_S
    dead_children: set[int] = set()
    while not _healthy(server.url):
        waited_s = time.monotonic() - start
        if (status := server.process.poll()) is not None:
            raise ServerFailedError(f"the server ended with status {status}\n{_tail(server.log)}")
        still_dead = dead_children & (dead_children := _dead_children(server.process.pid))
        if still_dead:
            raise ServerFailedError(f"a process of the server died: {still_dead}\n{_tail(server.log)}")
        if waited_s > deadline_s:
            raise ServerFailedError(f"the server did not answer within {deadline_s} s\n{_tail(server.log)}")
        if time.monotonic() > next_report:
            next_report += _REPORT_EVERY_S
            progress = f"server on port {server.port}: {waited_s:.0f} s, {_tail(server.log, 1)[:100]}"
            print(progress, file=sys.stderr, flush=True)  # noqa: T201 - for people who wait.
        time.sleep(_POLL_S)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:  # noqa: S310 - our own server.
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _dead_children(pid: int) -> set[int]:
    """Return children that died and that nobody waited for: how a crashed scheduler looks for a while."""
    return {entry.pid for entry in _processes() if entry.parent == pid and entry.is_dead}


def _tail(log: Path, lines: int = _TAIL_LINES) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
