# SPDX-License-Identifier: MIT
"""The server of a deployment, over as many restarts as a test needs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_cpu import launch

if TYPE_CHECKING:
    from types import TracebackType

    from ucm.testing.deployment import Deployment


class RestartableServer:
    """The server of a deployment, always on the same port; `with` starts and stops it.

    Args:
        deployment: What to serve.
        directory: Gets the logs; created.
        port: Where to serve; a free port if None.

    Attributes:
        logs: What each start has printed, in order.
    """

    def __init__(self, deployment: Deployment, directory: Path, *, port: int | None = None) -> None:
        self._deployment = deployment
        self._directory = directory
        self._port = launch.free_port() if port is None else port
        self._stack = ExitStack()
        self.logs: list[Path] = []
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> RestartableServer:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def restart(self) -> None:
        """Stop the server, as an operator does, and start it again."""
        self._stack.close()
        self._start()

    def scheduler_pids(self) -> list[int]:
        """Return the processes that own the caches, one per TP rank and in their order."""
        titles = {pid: _title(pid) for pid in self._server.alive()}
        return sorted((pid for pid in titles if "sglang::scheduler" in titles[pid]), key=titles.__getitem__)

    def kill(self) -> None:
        """End every process of the server at once, as a crash would."""
        self._server.kill()

    def _start(self) -> None:
        for root in self._deployment.storage_roots:
            root.mkdir(parents=True, exist_ok=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        self.logs.append(self._directory / f"server-{len(self.logs) + 1}.log")
        self._server = self._stack.enter_context(
            launch.running_command(
                self._deployment.command(self._port),
                log=self.logs[-1],
                port=self._port,
                env=self._deployment.environment(),
                deadline_s=self._deployment.start_deadline_s,
            )
        )


def thread_names(pid: int) -> list[str]:
    """Return the kernel's name of every thread of a process."""
    return [comm.read_text().strip() for comm in Path(f"/proc/{pid}/task").glob("*/comm")]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""  # It has just ended.
