# SPDX-License-Identifier: MIT
"""What our backend costs while nothing happens: threads and processor time."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.backends import FILE, OURS, Backend, transfer
from benchmarks.host_pages import HostPages
from benchmarks.pairs import expect
from benchmarks.processes import usage
from benchmarks.results import Report, Table, progress
from benchmarks.servers import NO_STORAGE, IdleServer, idle_servers
from ucm.testing.host_pools import (
    FLASH_COMPRESS_RATIOS,
    DeepSeekV4Model,
    DsaModel,
    HostPools,
    MambaModel,
    MhaModel,
    host_pools,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.pool_host import HostKVCache

MOST_THREADS = 16
MOST_IDLE_SHARE = 0.01
PAGES = 16
SETTLE_S = 5.0
WINDOWS = 6
METHOD = f"""\
`One process` registers real host pools with a backend, sets and gets {PAGES} pages of each pool, and
then does nothing: threads are counted from /proc, processor time is that of the whole process. `Idle
servers` are three real servers of the tiny MAMBA hybrid (SGLang's `--sleep-on-idle`, else its scheduler
spins and hides everything else), with our backend, with SGLang's `file` backend and with two cache tiers
only, each after a prompt has been stored and restored; all three are watched in the same windows.
Required: at most {MOST_THREADS} threads more than with the `file` backend (SGLang's own storage threads
run with both), and less than {MOST_IDLE_SHARE:.0%} of a core more than without storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """What one backend adds to a process."""

    backend: str
    pools: int
    threads_registered: int
    threads_used: int
    threads_closed: int
    idle_share: float  # Of one core.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """What the scheduler process of one idle server uses."""

    server: str
    threads: int
    idle_shares: list[float]  # Of one core, one per window.

    @property
    def idle_share(self) -> float:
        """The mean over all windows."""
        return statistics.fmean(self.idle_shares)


def measure(directory: Path, *, watch_s: float, with_servers: bool) -> Report:
    """Measure in this process, then on real servers."""
    figures = [
        _measure_pools(backend, count, directory, min(watch_s, 10.0))
        for count in (2, 8)
        for backend in (OURS, FILE)
    ]
    tables = [_pool_table(figures)]
    verdicts = [_pool_verdict(figures)]
    details: dict[str, object] = {"one_process": [asdict(figure) for figure in figures]}
    if with_servers:
        with idle_servers(directory, [NO_STORAGE, FILE, OURS]) as servers:
            windows = _watch(servers, watch_s)
        tables.append(_server_table(windows))
        verdicts.append(_server_verdict(windows))
        details["servers"] = [asdict(window) for window in windows]
    return Report(
        name="idle",
        title="Threads and idle processor time",
        method=METHOD,
        verdicts=verdicts,
        tables=tables,
        details=details,
    )


def _measure_pools(name: str, count: int, parent: Path, watch_s: float) -> PoolFigures:
    progress(f"idle: {name}, {count} pools in one process")
    directory = Path(tempfile.mkdtemp(dir=parent))
    pools, others = _two_pools() if count == 2 else _eight_pools()
    # Torch starts its own threads with the first copies; they are none of the backend's.
    torch.set_num_threads(1)
    before = usage(os.getpid()).threads
    backend = Backend(name, pools, directory, is_mla=count == 8)
    for pool_name, pool in others.items():
        backend.register(pool_name, pool)
    registered = usage(os.getpid()).threads
    _use(backend, {pool_name: pools[pool_name] for pool_name in pools.names} | others)
    used = usage(os.getpid())
    time.sleep(watch_s)
    idle_s = usage(os.getpid()).cpu_s - used.cpu_s
    backend.close()
    closed = usage(os.getpid()).threads
    shutil.rmtree(directory, ignore_errors=True)
    return PoolFigures(
        backend=name,
        pools=count,
        threads_registered=registered - before,
        threads_used=used.threads - before,
        threads_closed=closed - before,
        idle_share=idle_s / watch_s,
    )


def _two_pools() -> tuple[HostPools, dict[str, HostKVCache]]:
    return host_pools(MambaModel(), pages=PAGES), {}


def _eight_pools() -> tuple[HostPools, dict[str, HostKVCache]]:
    """Return the six pools of V4, and two of a draft model that arrive later."""
    flash = DeepSeekV4Model(compress_ratios=FLASH_COMPRESS_RATIOS, mtp_layers=1)
    pools = host_pools(flash, page_tokens=256, pages=PAGES, draft_tokens=2)
    draft = host_pools(MhaModel(), pages=PAGES)["kv"]
    return pools, {"draft": draft, "draft_indexer": host_pools(DsaModel(), pages=PAGES)["indexer"]}


def _use(backend: Backend, pools: dict[str, HostKVCache]) -> None:
    keys = [f"{page:064x}" for page in range(PAGES)]
    for name, pool in pools.items():
        if name == "kv":
            indices = torch.arange(PAGES * pool.page_size)
            expect(backend.set_primary(keys, indices), True, "set kv")
            expect(backend.get_primary(keys, indices), PAGES, "get kv")
            continue
        transfers = [transfer(name, keys, HostPages(pool, PAGES).first_indices(PAGES))]
        expect(backend.set_sidecars(transfers), {name: [True] * PAGES}, f"set {name}")
        expect(backend.get_sidecars(transfers), {name: [True] * PAGES}, f"get {name}")


def _watch(servers: Sequence[IdleServer], watch_s: float) -> list[ServerFigures]:
    """Watch all servers at the same time, in windows."""
    progress(f"idle: watching {len(servers)} servers for {watch_s:.0f} s")
    time.sleep(SETTLE_S)
    shares: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in range(WINDOWS):
        before = {server.name: usage(server.scheduler_pid).cpu_s for server in servers}
        started = time.monotonic()
        time.sleep(watch_s / WINDOWS)
        for server in servers:
            used_s = usage(server.scheduler_pid).cpu_s - before[server.name]
            shares[server.name].append(used_s / (time.monotonic() - started))
    return [
        ServerFigures(
            server=server.name, threads=usage(server.scheduler_pid).threads, idle_shares=shares[server.name]
        )
        for server in servers
    ]


def _pool_table(figures: Sequence[PoolFigures]) -> Table:
    columns = ["backend", "pools", "threads added", "after use", "after close", "idle CPU, % of a core"]
    rows = [
        [
            figure.backend,
            str(figure.pools),
            f"{figure.threads_registered:+d}",
            f"{figure.threads_used:+d}",
            f"{figure.threads_closed:+d}",
            f"{figure.idle_share:.2%}",
        ]
        for figure in figures
    ]
    return Table("One process", columns, rows)


def _pool_verdict(figures: Sequence[PoolFigures]) -> str:
    ours = [figure for figure in figures if figure.backend == OURS]
    met = all(f.threads_used <= MOST_THREADS and f.idle_share < MOST_IDLE_SHARE for f in ours)
    counts = ", ".join(
        f"{f.threads_used} threads with {f.pools} pools ({f.idle_share:.2%} CPU)" for f in ours
    )
    return f"One process: {'met' if met else 'MISSED'}: our backend adds {counts}."


def _server_table(figures: Sequence[ServerFigures]) -> Table:
    base = figures[0]
    columns = ["server", "scheduler threads", "idle CPU, % of a core", "min", "max", f"minus {base.server}"]
    rows = [
        [
            figure.server,
            str(figure.threads),
            f"{figure.idle_share:.2%}",
            f"{min(figure.idle_shares):.2%}",
            f"{max(figure.idle_shares):.2%}",
            f"{figure.threads - base.threads:+d} threads, {figure.idle_share - base.idle_share:+.2%}",
        ]
        for figure in figures
    ]
    return Table("Idle servers", columns, rows)


def _server_verdict(figures: Sequence[ServerFigures]) -> str:
    by_name = {figure.server: figure for figure in figures}
    ours, file, none = by_name[OURS], by_name[FILE], by_name[NO_STORAGE]
    threads, share = ours.threads - file.threads, ours.idle_share - none.idle_share
    met = threads <= MOST_THREADS and share < MOST_IDLE_SHARE
    return (
        f"Idle servers: {'met' if met else 'MISSED'}: {threads:+d} threads against the `file` backend, "
        f"{share:+.2%} of a core against no storage ({file.idle_share - none.idle_share:+.2%} with `file`)."
    )
