# SPDX-License-Identifier: MIT
"""Set, get and exists on SGLang's real host pools: our backend against SGLang's `file` backend."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.backends import FILE, OURS, Backend, transfer
from benchmarks.host_pages import HostPages
from benchmarks.machine import MEMORY_FILESYSTEMS, available_memory_bytes, describe_filesystem
from benchmarks.pairs import LocalContestant, run_pairs
from benchmarks.plot import draw_speedups
from benchmarks.results import (
    Comparison,
    Report,
    comparison_details,
    comparison_table,
    format_bytes,
    glance_table,
    progress,
    summarize,
)
from ucm.testing.host_pools import (
    FLASH_COMPRESS_RATIOS,
    DeepSeekV4Model,
    DsaModel,
    HostPools,
    MambaModel,
    MhaModel,
    MlaModel,
    Model,
    SwaModel,
    host_pools,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LARGE_PAGE_BYTES = 500_000
LARGE_PAGE_SPEEDUP = 1.5
SPARE_BYTES = 2_000_000_000
MOST_STORED_BYTES = 500_000_000
MOST_PAGES_ON_DISK = 32  # More would measure the disk, which writes back meanwhile.
SOME_PAGES = 8
PRIMARY = "kv"
BUSY, NEW = ", busy", ", new"
METHOD = """\
Every line is the same call on the same host memory: `ours` is `UnifiedCacheStore`, the other is SGLang's
`file` backend, both created by SGLang's factory and called as its cache controller calls them (`file`:
the generic page functions for the primary KV; both: v2 for sidecars). Keys are new in every turn, host
pages are overwritten before each get and compared afterwards. A pair is the mean of two turns of
opposite order; `speed-up` is the time of `file` over ours, pair by pair. Ours keeps blocks in 4,096
directories per pool, which exist after a while: they are made beforehand, except for lines marked `new`.
`busy`: beside a Python thread that never sleeps. Required: no slower, and 1.5 times as fast for several
pages of 0.5 MB and more; one page is one write of the same bytes for both. Exists is shown: a query takes
a fraction of a millisecond, and ours leaves what may wait for a disk to a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model whose pools are measured."""

    name: str
    model: Model
    page_tokens: int
    is_mla: bool = False
    draft_tokens: int = 0


CASES = (
    Case(name="MHA small", model=MhaModel(layers=4, heads=2, head_dim=64), page_tokens=16),
    Case(name="MHA large", model=MhaModel(layers=12, heads=8, head_dim=128), page_tokens=64),
    Case(
        name="MLA small",
        model=MlaModel(layers=4, kv_lora_rank=512, qk_rope_head_dim=64),
        page_tokens=16,
        is_mla=True,
    ),
    Case(
        name="DSA small",
        model=DsaModel(layers=4, kv_lora_rank=512, qk_rope_head_dim=64),
        page_tokens=64,
        is_mla=True,
    ),
    Case(
        name="DSA large",
        model=DsaModel(layers=61, kv_lora_rank=512, qk_rope_head_dim=64),
        page_tokens=64,
        is_mla=True,
    ),
    Case(
        name="Mamba small",
        model=MambaModel(
            anchor=MhaModel(layers=1, heads=2, head_dim=64),
            linear_layers=3,
            temporal_shape=(4, 32, 32),
            conv_shapes=((384, 3),),
        ),
        page_tokens=64,
    ),
    Case(
        name="Mamba large",
        model=MambaModel(
            anchor=MhaModel(layers=2, heads=4, head_dim=128),
            linear_layers=3,
            temporal_shape=(32, 128, 128),
            conv_shapes=((8192, 3),),
        ),
        page_tokens=64,
    ),
    Case(name="SWA small", model=SwaModel(full_layers=4, swa_layers=4, heads=2, head_dim=64), page_tokens=16),
    Case(
        name="SWA large", model=SwaModel(full_layers=12, swa_layers=12, heads=8, head_dim=64), page_tokens=64
    ),
    Case(
        name="DeepSeek V4 Flash",
        model=DeepSeekV4Model(compress_ratios=FLASH_COMPRESS_RATIOS, mtp_layers=1),
        page_tokens=256,
        is_mla=True,
        draft_tokens=2,
    ),
)


def measure(
    directories: Sequence[Path], *, cases: Sequence[Case], batches: Sequence[int], budget_s: float
) -> Report:
    """Compare on every case, directory and batch; on the first directory also beside a spinning thread."""
    torch.set_num_threads(1)  # As SGLang's model runner does where there is a GPU.
    comparisons: list[Comparison] = []
    for case in cases:
        comparisons += _measure_case(case, directories, batches, budget_s)
    first = describe_filesystem(directories[0])
    moving = [comparison for comparison in comparisons if comparison.moved_bytes]
    asking = [comparison for comparison in comparisons if comparison.labels["call"].startswith("exists")]
    return Report(
        name="pools",
        title="Set, get and exists on the real host pools, against SGLang's file backend",
        method=METHOD,
        verdicts=[summarize("Get and set", moving)],
        tables=[
            glance_table(
                "Speed-ups of get and set", moving, rows=("storage", "pool"), columns=("call", "pages")
            ),
            glance_table("Speed-ups of exists", asking, rows=("storage", "pool"), columns=("call", "pages")),
            comparison_table("Comparisons", comparisons),
        ],
        details={"comparisons": comparison_details(comparisons)},
        draw=partial(
            draw_speedups,
            [comparison for comparison in comparisons if comparison.labels["storage"] == first],
            title=f"Ours against SGLang's file backend, on {first}",
            panel="call",
            row="pool",
            series="pages",
        ),
    )


class ModelContestant(LocalContestant):
    """One backend working on all pools of a model; a phase is a call and a pool."""

    def __init__(self, backend: Backend, pages: dict[str, HostPages], count: int) -> None:
        self.name = backend.name
        self._backend = backend
        self._pages = pages
        self._count = count
        self._stored_bytes = 0

    def prepare(self, phase: str, round_number: int) -> None:
        """Make what SGLang hands over, and spoil the host pages that a get has to restore."""
        call, pool = _split(phase)
        if call == "get":
            self._pages[pool].spoil(self._count)
        self._call = self._prepared(call, pool, round_number)

    def run(self, phase: str, round_number: int) -> object:
        """Make one call."""
        del phase, round_number
        return self._call()

    def _prepared(self, call: str, pool: str, round_number: int) -> Callable[[], object]:
        keys = _keys(round_number, self._count, stored=call != "exists miss")
        if call.startswith("exists"):
            return partial(self._backend.restorable_pages, keys)
        indices = self._pages[pool].first_indices(self._count)
        if pool == PRIMARY:
            primary = self._backend.set_primary if call == "set" else self._backend.get_primary
            return partial(primary, keys, indices)
        sidecars = self._backend.set_sidecars if call == "set" else self._backend.get_sidecars
        return partial(sidecars, [transfer(pool, keys, indices)])

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check the verdicts, and after a get the bytes."""
        call, pool = _split(phase)
        expected: object = {
            "exists hit": self._count,
            "exists miss": 0,
            "set": True if pool == PRIMARY else {pool: [True] * self._count},
            "get": self._count if pool == PRIMARY else {pool: [True] * self._count},
        }[call]
        if result != expected:
            raise AssertionError(
                f"{self.name}, {phase}, round {round_number}: {result} instead of {expected}"
            )
        if call == "get":
            self._pages[pool].check(self._count)

    def finish(self, round_number: int) -> None:
        """Free the space of the rounds so far, now and then: looking for all blocks takes a while."""
        del round_number
        self._stored_bytes += self._count * sum(pages.page_bytes for pages in self._pages.values())
        if self._stored_bytes > MOST_STORED_BYTES:
            self.clear()

    def clear(self) -> None:
        """Free the space of all rounds."""
        self._backend.clear()
        self._stored_bytes = 0


def _measure_case(
    case: Case, directories: Sequence[Path], batches: Sequence[int], budget_s: float
) -> list[Comparison]:
    # The assembler makes host pools twice as large as the device pools, and SWA wants more than one page.
    pools = host_pools(
        case.model,
        page_tokens=case.page_tokens,
        pages=max(4, max(batches) // 2),
        draft_tokens=case.draft_tokens,
    )
    batches = _batches_that_fit(case, pools, batches)
    pages = {name: HostPages(pools[name], max(batches)) for name in pools.names}
    for pool_pages in pages.values():
        pool_pages.fill()
    comparisons = []
    some = min(SOME_PAGES, max(batches))
    for parent in directories:
        storage = describe_filesystem(parent)
        most = max(batches) if storage in MEMORY_FILESYSTEMS else MOST_PAGES_ON_DISK
        with _backends(case, pools, parent) as (ours, other):
            compare = partial(_compare, case, ours, other, pages, budget_s)
            comparisons += compare(some, storage + NEW)
            ours.age()
            for count in (count for count in batches if count <= most):
                comparisons += compare(count, storage)
            if parent == directories[0]:
                with _spinning_thread():
                    comparisons += compare(some, storage + BUSY)
    return comparisons


def _batches_that_fit(case: Case, pools: HostPools, batches: Sequence[int]) -> list[int]:
    """Leave out batches that would not fit into memory: once in the pools, twice stored."""
    bytes_per_page = 3 * sum(HostPages(pools[name], 1).page_bytes for name in pools.names)
    room = available_memory_bytes() - SPARE_BYTES
    fitting = [count for count in batches if count * bytes_per_page <= room]
    for count in set(batches) - set(fitting):
        progress(
            f"pools: {case.name}, {count} pages left out: they need {format_bytes(count * bytes_per_page)}"
        )
    return fitting


def _compare(
    case: Case,
    ours: Backend,
    other: Backend,
    pages: dict[str, HostPages],
    budget_s: float,
    count: int,
    storage: str,
) -> list[Comparison]:
    progress(f"pools: {case.name}, {count} pages, {storage}")
    phases = [
        *(f"set {name}" for name in reversed(pages)),
        "exists hit",
        *(f"get {name}" for name in pages),
        "exists miss",
    ]
    contestants = ModelContestant(ours, pages, count), ModelContestant(other, pages, count)
    measured = run_pairs(*contestants, phases, budget_s=budget_s)
    for contestant in contestants:
        contestant.clear()
    comparisons = []
    for phase, times in measured.items():
        call, pool = _split(phase)
        page_bytes = pages[pool].page_bytes if pool else 0
        comparisons.append(
            Comparison(
                labels={
                    "storage": storage,
                    "pool": f"{case.name}: {pool} {format_bytes(page_bytes)}"
                    if pool
                    else f"{case.name}: all",
                    "pages": str(count),
                    "call": call,
                },
                other=FILE,
                moved_bytes=page_bytes * count,
                times=times,
                required_speedup=_required(storage, page_bytes, count),
            )
        )
    return comparisons


def _required(storage: str, page_bytes: int, count: int) -> float | None:
    """Return what is asked of a set or get; a hit query moves nothing and is only shown."""
    if storage.endswith(NEW) or not page_bytes:
        return None
    return LARGE_PAGE_SPEEDUP if page_bytes >= LARGE_PAGE_BYTES and count > 1 else 1.0


@contextmanager
def _backends(case: Case, pools: HostPools, parent: Path) -> Iterator[tuple[Backend, Backend]]:
    with ExitStack() as stack:
        backends = []
        for name in (OURS, FILE):
            directory = Path(tempfile.mkdtemp(dir=parent))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            backends.append(Backend(name, pools, directory, is_mla=case.is_mla))
            stack.callback(backends[-1].close)
        yield backends[0], backends[1]


@contextmanager
def _spinning_thread() -> Iterator[None]:
    """Hold the GIL as often as SGLang's scheduler does: it polls for requests without sleeping."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _split(phase: str) -> tuple[str, str]:
    if phase.startswith("exists"):
        return phase, ""
    call, _, pool = phase.partition(" ")
    return call, pool


def _keys(round_number: int, count: int, *, stored: bool) -> list[str]:
    """Return page hashes as SGLang makes them: 64 hex digits."""
    return [hashlib.sha256(f"{round_number} {page} {stored}".encode()).hexdigest() for page in range(count)]
