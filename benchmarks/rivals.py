# SPDX-License-Identifier: MIT
"""Our backend against all others that run here, and against what no backend can beat."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.backends import FILE, OURS, backend_settings
from benchmarks.block_work import PHASES
from benchmarks.machine import MEMORY_FILESYSTEMS, describe_filesystem
from benchmarks.page_sets import LIMIT_PHASES, PageSet
from benchmarks.pairs import run_pairs
from benchmarks.processes import resident_bytes, usage
from benchmarks.remote import REPOSITORY, RemoteContestant, RemoteError
from benchmarks.reporting import report_comparisons
from benchmarks.results import (
    Comparison,
    Report,
    Table,
    format_bytes,
    glance_table,
    progress,
)
from benchmarks.rival_packages import (
    RivalMissingError,
    install_mooncake,
    install_native,
    install_nixl,
    mooncake_master,
    python_path,
)
from benchmarks.rival_process import MEMORY, PLAIN_FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEGMENT_BYTES = 4 << 30
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How to start one side.

    Attributes:
        settings: What selects the backend, see `backend_settings`; None for a limit.
        environment: Of its process, beside ours.
        helpers: Ids of processes that it needs and that count with it.
    """

    settings: tuple[str, dict[str, object]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    helpers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another backend, or a limit.

    Attributes:
        name: Shown in tables.
        prepare: Installs and starts what it needs, given where packages go and where it stores.
        is_limit: It has no keys, and nobody has to reach it.
        is_required: Ours has to be as fast: they promise files that are whole or absent, as ours does.
        stores_in_memory: It has no directory, so one measurement is enough.
        needs_disk: It reads and writes around the page cache.
    """

    name: str
    prepare: Callable[[ExitStack, Path, Path], Setup]
    is_limit: bool = False
    is_required: bool = False
    stores_in_memory: bool = False
    needs_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a backend added to an idle process that had the pools of one set of pages, after use."""

    backend: str
    threads: int
    resident_bytes: int
    idle_share: float  # Of one core.


@dataclass(slots=True)
class Findings:
    """What has been measured so far; `left_out` says why a rival was not."""

    costs_of: str
    comparisons: list[Comparison] = field(default_factory=list)
    costs: dict[str, Costs] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def _ours(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack, packages
    return Setup(settings=backend_settings(OURS, directory))


def _native(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack
    registered, ours = backend_settings(OURS, directory)
    engine = {
        "ucm_connector_name": "UcmPipelineStore",
        "ucm_connector_config": {
            "store_pipeline": "Posix",
            "storage_backends": str(directory),
            "engine": "native",
            "native_package": str(install_native(packages)),
        },
    }
    extra_config = {name: value for name, value in ours.items() if name != "storage_backends"}
    extra_config["kv_connector_extra_config"] = engine
    return Setup(
        settings=(registered, extra_config), environment={"UCM_LOG_TO_FILE": "0", "UCM_LOG_LEVEL": "off"}
    )


def _file(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack, packages
    return Setup(settings=backend_settings(FILE, directory))


def _nixl(stack: ExitStack, packages: Path, directory: Path, *, direct: bool) -> Setup:
    del stack
    return Setup(
        settings=("nixl", {"plugin": {"posix": {"active": True}}, "use_direct_io": direct}),
        environment={
            "PYTHONPATH": python_path(REPOSITORY, install_nixl(packages)),
            "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(directory),
            "NIXL_LOG_LEVEL": "ERROR",
        },
    )


def _mooncake(stack: ExitStack, packages: Path, directory: Path, *, copies: bool) -> Setup:
    del directory
    package = install_mooncake(packages)
    environment = {
        "PYTHONPATH": python_path(REPOSITORY, package),
        "MC_STORE_MEMCPY": str(int(copies)),
        "GLOG_minloglevel": "2",
    }
    address, pid = stack.enter_context(mooncake_master(package, os.environ | environment))
    extra_config = {
        "master_server_address": address,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": SEGMENT_BYTES,
    }
    return Setup(settings=("mooncake", extra_config), environment=environment, helpers=(pid,))


def _limit(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack, packages, directory
    return Setup()


RIVALS = (
    Rival(name="native", prepare=_native, is_required=True),
    Rival(name=FILE, prepare=_file, is_required=True),
    Rival(name="nixl", prepare=partial(_nixl, direct=False)),
    Rival(name="nixl direct", prepare=partial(_nixl, direct=True), needs_disk=True),
    Rival(name="mooncake TCP", prepare=partial(_mooncake, copies=False), stores_in_memory=True),
    Rival(name="mooncake memcpy", prepare=partial(_mooncake, copies=True), stores_in_memory=True),
    Rival(name=PLAIN_FILES, prepare=_limit, is_limit=True),
    Rival(name=MEMORY, prepare=_limit, is_limit=True, stores_in_memory=True),
)
METHOD = f"""\
Each side is a process of its own with the same host pools of SGLang, its backend created by SGLang's factory
and called as its cache controller does: sidecars and then the primary KV to set, the other way round to get,
one query over all pools. Keys are new in every turn, host pages are overwritten before each get and compared
after it, data is warm. `native`: our connector on UCM's own PosixStore. `{FILE}`, `nixl`, `mooncake`: those
of SGLang. `nixl` is its POSIX plugin with `use_direct_io` off, `nixl direct` with it on, its default: it then
waits for the disk, others for the page cache. Both write in place and check nothing. `mooncake` keeps
data in memory, in a segment of {format_bytes(SEGMENT_BYTES)} that counts as its memory as far as it was used
(so do its master's threads, memory and processor time): `TCP` goes over the loopback interface, as to another
machine; `memcpy` is what it does within one. Limits: `{PLAIN_FILES}` writes and reads one open file a pool
with one call, `{MEMORY}` copies in memory on one thread. Required: as fast as `native` and `{FILE}`."""


def measure(
    directories: Sequence[Path],
    *,
    packages: Path,
    rivals: Sequence[Rival],
    page_sets: Sequence[PageSet],
    budget_s: float,
    idle_s: float,
) -> Report:
    """Compare on every directory, set of pages and rival; a rival that cannot run here is left out."""
    found = Findings(page_sets[0].name)
    for directory in directories:
        storage = describe_filesystem(directory)
        with _started(directory, packages, Rival(name=OURS, prepare=_ours)) as ours:
            for rival in rivals:
                if rival.name in found.left_out or not _is_measured(
                    rival, storage, is_first=directory == directories[0]
                ):
                    continue
                _measure_rival(found, ours, rival, directory, packages, page_sets, budget_s, idle_s)
    return _report(found)


def _is_measured(rival: Rival, storage: str, *, is_first: bool) -> bool:
    if rival.needs_disk:
        return storage not in MEMORY_FILESYSTEMS
    return is_first or not rival.stores_in_memory


def _measure_rival(
    found: Findings,
    ours: Side,
    rival: Rival,
    directory: Path,
    packages: Path,
    page_sets: Sequence[PageSet],
    budget_s: float,
    idle_s: float,
) -> None:
    storage = describe_filesystem(directory)
    try:
        with _started(directory, packages, rival) as other:
            for page_set in page_sets:
                progress(f"rivals: {rival.name}, {page_set.name}, {storage}")
                before = {side: side.open(page_set) for side in (ours, other)}
                phases = LIMIT_PHASES if rival.is_limit else PHASES
                times = run_pairs(ours, other, phases, budget_s=budget_s)
                for side in (ours, other):
                    # Later, what an earlier set of pages has left would be counted with it.
                    if page_set == page_sets[0] and side.name not in found.costs:
                        found.costs[side.name] = side.costs(before[side], idle_s)
                found.comparisons += [
                    Comparison(
                        labels={
                            "storage": storage,
                            "pages": page_set.name,
                            "call": phase,
                            "backend": rival.name,
                        },
                        other=rival.name,
                        moved_bytes=before[ours]["moved_bytes"] if phase in LIMIT_PHASES else 0,
                        times=paired,
                        required_speedup=1.0 if rival.is_required else None,
                    )
                    for phase, paired in times.items()
                ]
    except (RivalMissingError, RemoteError) as exc:
        if isinstance(exc, RemoteError) and exc.contestant == OURS:
            raise
        progress(f"rivals: {rival.name} left out: {exc}")
        found.left_out[rival.name] = str(exc)


class Side(RemoteContestant):
    """One side, in a process of its own."""

    def __init__(self, name: str, directory: Path, setup: Setup) -> None:
        super().__init__(
            name,
            "benchmarks.rival_process",
            [name, str(directory), json.dumps(setup.settings)],
            os.environ | {"PYTHONPATH": python_path(REPOSITORY)} | setup.environment,
        )
        self._processes = (self.pid, *setup.helpers)

    def open(self, page_set: PageSet) -> dict[str, int]:
        """Go over to a set of pages; returns `moved_bytes`, and `threads` and `resident_bytes` so far."""
        return dict(self.call("open", page_set.name))

    def costs(self, before: dict[str, int], idle_s: float) -> Costs:
        """Watch the process, and those that it needs, doing nothing."""
        time.sleep(SETTLE_S)
        used = self._cpu_s()
        time.sleep(idle_s)
        return Costs(
            backend=self.name,
            threads=sum(usage(pid).threads for pid in self._processes) - before["threads"],
            resident_bytes=sum(map(resident_bytes, self._processes)) - before["resident_bytes"],
            idle_share=(self._cpu_s() - used) / idle_s,
        )

    def _cpu_s(self) -> float:
        return sum(usage(pid).cpu_s for pid in self._processes)


@contextmanager
def _started(parent: Path, packages: Path, rival: Rival) -> Iterator[Side]:
    directory = Path(tempfile.mkdtemp(dir=parent))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        setup = rival.prepare(stack, packages, directory)
        yield stack.enter_context(closing(Side(rival.name, directory, setup)))


def _report(found: Findings) -> Report:
    title = "Our backend against the others, and against the limits"
    glance = glance_table(
        "Speed-ups at a glance",
        found.comparisons,
        rows=("storage", "pages", "call"),
        columns=("backend",),
    )
    report = report_comparisons(
        found.comparisons,
        name="rivals",
        title=title,
        method=METHOD,
        what="Set, get and exists",
        axes=("call", "pages", "backend"),
        tables=[_costs_table(found), glance],
    )
    report.verdicts += [f"Left out: {name}: {reason}" for name, reason in found.left_out.items()]
    report.details |= {
        "costs": [asdict(cost) for cost in found.costs.values()],
        "left_out": found.left_out,
    }
    return report


def _costs_table(found: Findings) -> Table:
    columns = ["backend", "threads", "resident memory", "idle CPU, % of a core"]
    rows = [
        [cost.backend, f"{cost.threads:+d}", _signed_bytes(cost.resident_bytes), f"{cost.idle_share:.2%}"]
        for cost in found.costs.values()
    ]
    return Table(f"Added to a process with the host pools of {found.costs_of}, after use", columns, rows)


def _signed_bytes(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"
