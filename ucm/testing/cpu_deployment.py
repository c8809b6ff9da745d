# SPDX-License-Identifier: MIT
"""Deployments of tiny models with our backend on the CPU reference platform."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_cpu import PLATFORM_NAME, launch

from ucm.testing.deployment import Deployment
from ucm.testing.sglang_selection import selection_environment

_PLATFORM_FLAGS = (
    # Small, so that a few prompts fill L1.
    *("--max-total-tokens", "2048"),
    # The default is derived from the memory that other processes leave, and may be negative.
    *("--mem-fraction-static", "0.5"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDeployment(Deployment):
    """A server on the CPU reference platform.

    Args:
        chunk_tokens: `--chunked-prefill-size`; -1: prompts are never split.
        tp: `--tp`; each rank is a process, all on this machine's cores.
    """

    chunk_tokens: int
    tp: int = 1

    def command(self, port: int) -> list[str]:
        """Return the command line of a server on this port."""
        flags = [
            *_PLATFORM_FLAGS,
            *("--chunked-prefill-size", str(self.chunk_tokens)),
            *("--tp", str(self.tp)),
            *self.cache_flags(),
            *self.extra_flags,
        ]
        return launch.command(self.model, port, *flags)

    def environment(self) -> dict[str, str]:
        """Return the server's whole environment."""
        environment = launch.environment() | selection_environment(
            self.selection, sglang=self.sglang, other_plugins=[PLATFORM_NAME]
        )
        if self.tp > 1:
            # SGLang binds ranks to NUMA nodes otherwise, and wants as many of them as ranks.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.tp)))
        return environment
