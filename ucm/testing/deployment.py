# SPDX-License-Identifier: MIT
"""What every deployment of a model with our backend has in common, whatever it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucm.testing.sglang_selection import Selection, backend_flags

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct"}

_HICACHE_FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(ABC):
    """How one server is started.

    Args:
        model: Directory of the checkpoint.
        selection: How it gets the backend.
        sglang: Package directory of the SGLang to serve, patched for that selection; None: the installed one.
        layout: `--hicache-mem-layout`; decides the I/O backend.
        storage_roots: Where the backend stores; created.
        storage_options: Other settings of the backend.
        extra_flags: What this deployment needs besides; wins over all others.
        start_deadline_s: How long a server may take until it answers.
    """

    model: Path
    selection: Selection
    sglang: Path | None
    layout: str
    storage_roots: tuple[Path, ...]
    storage_options: Mapping[str, object] = field(default_factory=dict)
    extra_flags: tuple[str, ...] = ()
    start_deadline_s: float = 300.0

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command line of a server on this port."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the server's whole environment."""

    def cache_flags(self) -> list[str]:
        """Return the flags that make the server cache in all tiers, with our backend as the third."""
        return [
            *_HICACHE_FLAGS,
            *("--hicache-mem-layout", self.layout, "--hicache-io-backend", _IO_BACKENDS[self.layout]),
            *backend_flags(self.selection, self.storage_roots, self.storage_options),
        ]
