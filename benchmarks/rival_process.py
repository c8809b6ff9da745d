# SPDX-License-Identifier: MIT
"""The other side of `rivals`: one backend, or a limit, on one set of pages after the other."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.backends import Backend
from benchmarks.page_sets import PAGE_SETS, BackendPages, MemoryCopies, PageSetWork, PlainFiles, host_pages
from benchmarks.processes import resident_bytes, usage
from benchmarks.remote import serve

PLAIN_FILES, MEMORY = "plain files", "memcpy"


class RivalSide:
    """Answers the parent.

    Args:
        name: Of the backend or limit.
        directory: Where it stores.
        settings: What selects the backend, see `backend_settings`; None for a limit.
    """

    def __init__(self, name: str, directory: Path, settings: tuple[str, dict[str, object]] | None) -> None:
        self._name = name
        self._directory = directory
        self._settings = settings
        self._work: PageSetWork | None = None

    def open(self, page_set_name: str) -> dict[str, int]:
        """Go over to a set of pages; tell what one set or get moves, and what the process used before."""
        if self._work is not None:
            self._work.close()
            self._work = None
            gc.collect()
        page_set = next(known for known in PAGE_SETS if known.name == page_set_name)
        pools = page_set.host_pools()
        pages = host_pages(page_set, pools)
        before = {"threads": usage(os.getpid()).threads, "resident_bytes": resident_bytes(os.getpid())}
        if self._name == PLAIN_FILES:
            self._work = PlainFiles(self._name, self._directory, pages, page_set.count)
        elif self._name == MEMORY:
            self._work = MemoryCopies(self._name, pages, page_set.count)
        else:
            backend = Backend(
                self._name,
                pools,
                self._directory,
                is_mla=page_set.is_mla,
                settings=self._settings,
                model_name=f"benchmark/{PAGE_SETS.index(page_set)}",
            )
            backend.age()
            self._work = BackendPages(backend, pages, page_set.count, page_set.page_tokens)
        return {"moved_bytes": self._work.moved_bytes, **before}

    def timed(self, phase: str, round_number: int) -> float:
        """Do one phase of one round; return its seconds."""
        return self._opened().timed(phase, round_number)

    def finish(self, round_number: int) -> None:
        """End a round."""
        self._opened().finish(round_number)

    def _opened(self) -> PageSetWork:
        if self._work is None:
            raise RuntimeError("no set of pages is open")
        return self._work


def main() -> None:
    """Serve the parent until it goes away."""
    name, directory, settings, descriptor = sys.argv[1:]
    torch.set_num_threads(1)  # As SGLang's model runner does where there is a GPU.
    chosen: Any = json.loads(settings)
    serve(RivalSide(name, Path(directory), tuple(chosen) if chosen else None), int(descriptor))
    os._exit(0)  # Some backends crash while they are taken down.


if __name__ == "__main__":
    main()
