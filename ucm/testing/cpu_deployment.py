# SPDX-License-Identifier: MIT
"""Deployments of tiny models with our backend on the CPU reference platform."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_cpu import PLATFORM_NAME, launch

from ucm.testing.sglang_selection import Selection, backend_flags, selection_environment

if TYPE_CHECKING:
    from types import TracebackType

_IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct"}

_HICACHE_FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    # Small, so that a few prompts fill L1.
    *("--max-total-tokens", "2048"),
    # The default is derived from the memory that other processes leave, and may be negative.
    *("--mem-fraction-static", "0.5"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDeployment:
    """How one server is started.

    Args:
        model: Directory of the checkpoint.
        selection: How it gets the backend.
        patched: SGLang's patched package directory; needed for that selection only.
        layout: `--hicache-mem-layout`; decides the I/O backend.
        chunk_tokens: `--chunked-prefill-size`; -1: prompts are never split.
        storage_roots: Where the backend stores; created.
        extra_flags: What this deployment needs besides; wins over all others.
    """

    model: Path
    selection: Selection
    patched: Path | None
    layout: str
    chunk_tokens: int
    storage_roots: tuple[Path, ...]
    extra_flags: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """Return the server's flags, without those that every server on this platform has."""
        return [
            *_HICACHE_FLAGS,
            *("--chunked-prefill-size", str(self.chunk_tokens)),
            *("--hicache-mem-layout", self.layout, "--hicache-io-backend", _IO_BACKENDS[self.layout]),
            *backend_flags(self.selection, self.storage_roots),
            *self.extra_flags,
        ]

    def environment(self) -> dict[str, str]:
        """Return the server's whole environment."""
        return launch.environment() | selection_environment(
            self.selection, patched=self.patched, other_plugins=[PLATFORM_NAME]
        )


class RestartableServer:
    """The server of a deployment, always on the same port; `with` starts and stops it.

    Attributes:
        logs: What each start has printed, in order.
    """

    def __init__(self, deployment: CpuDeployment, directory: Path) -> None:
        self._deployment = deployment
        self._directory = directory
        self._port = launch.free_port()
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
        """Return the processes that own the caches, one per rank."""
        return [pid for pid in self._server.alive() if _is_scheduler(pid)]

    def _start(self) -> None:
        for root in self._deployment.storage_roots:
            root.mkdir(parents=True, exist_ok=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        self.logs.append(self._directory / f"server-{len(self.logs) + 1}.log")
        self._server = self._stack.enter_context(
            launch.running_server(
                self._deployment.model,
                *self._deployment.flags(),
                log=self.logs[-1],
                port=self._port,
                env=self._deployment.environment(),
            )
        )


def thread_names(pid: int) -> list[str]:
    """Return the kernel's name of every thread of a process."""
    return [comm.read_text().strip() for comm in Path(f"/proc/{pid}/task").glob("*/comm")]


def _is_scheduler(pid: int) -> bool:
    return "sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_text()
