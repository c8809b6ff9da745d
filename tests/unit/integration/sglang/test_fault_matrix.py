# SPDX-License-Identifier: MIT
"""Every fault of storage against the backend on SGLang's real host pools; see docs/faults.md."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from ucm.store.posix.engine import SharedEngine
from ucm.testing.host_pools import MambaModel, MhaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_page, read_pages
from ucm.testing.storage_faults import FAULTS, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.pool_host import HostKVCache

    from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore

    from .conftest import Attach

DEADLINE_S = 1.0
# A second, and some time for a busy machine.
RECOVERY_S = 10.0
BEFORE, MEANWHILE, AFTERWARDS, NEVER = (
    [f"{word}-{n}" for n in range(4)] for word in ("before", "meanwhile", "afterwards", "never")
)
# Where pages of each kind of key are stored from, and where they are restored to meanwhile.
PAGES = {"before": [0, 1, 2, 3], "meanwhile": [4, 5, 6, 7], "afterwards": [8, 9, 10, 11]}
TARGETS = [12, 13, 14, 15]


class Service:
    """A backend with a primary, a staged and a zero-copy pool, checked as SGLang would use it."""

    def __init__(self, attach: Attach, root: Path) -> None:
        model, draft = host_pools(MambaModel()), host_pools(MhaModel(layers=5))
        self.pools: dict[PoolName, HostKVCache] = {
            PoolName.KV: model["kv"],
            PoolName.MAMBA: model["mamba"],
            PoolName.DRAFT: draft.anchor,
        }
        self._guards = (model.guards, draft.guards)
        self._attach, self._root, self._model = attach, root, model
        self.contents = {name: fill_random(pool) for name, pool in self.pools.items()}
        self.backend = self.attach()
        self.calls = 0

    def attach(self) -> UnifiedCacheStore:
        timeouts = dict.fromkeys(("load_timeout_s", "dump_timeout_s", "lookup_timeout_s"), DEADLINE_S)
        backend = self._attach(self._model, extra_config={"storage_backends": str(self._root), **timeouts})
        backend.register_mem_host_pool_v2(self.pools[PoolName.DRAFT], PoolName.DRAFT)
        return backend

    def store(self, keys: list[str]) -> dict[PoolName, list[bool]]:
        return self._move("set", keys, PAGES[keys[0].split("-")[0]])

    def restore(self, keys: list[str]) -> dict[PoolName, list[bool]]:
        """Restore pages and fail if one that is said to be restored has a wrong byte."""
        before = {name: read_pages(pool) for name, pool in self.pools.items()}
        verdicts = self._move("get", keys, TARGETS)
        sources = PAGES.get(keys[0].split("-")[0], [])
        for name, pool in self.pools.items():
            for page in set(range(16)) - set(TARGETS):
                assert read_page(pool, page) == before[name][page]
            for done, source, target in zip(verdicts[name], sources, TARGETS, strict=bool(sources)):
                assert not done or read_page(pool, target) == self.contents[name][source]
        assert all(guard.intact() for guard in self._guards)
        return verdicts

    def stored(self, keys: list[str]) -> int:
        """Return how many leading pages all pools have."""
        self.calls += 1
        names = (PoolName.MAMBA, PoolName.DRAFT)
        return int(
            self.backend.batch_exists_v2(keys, [PoolTransfer(name=name) for name in names]).kv_hit_pages
        )

    def _move(self, verb: str, keys: list[str], pages: list[int]) -> dict[PoolName, list[bool]]:
        self.calls += 2
        transfers = [
            PoolTransfer(name=name, keys=keys, host_indices=page_indices(self.pools[name], pages))
            for name in (PoolName.MAMBA, PoolName.DRAFT)
        ]
        v2 = self.backend.batch_set_v2 if verb == "set" else self.backend.batch_get_v2
        v1 = self.backend.batch_set_v1 if verb == "set" else self.backend.batch_get_v1
        verdicts = {PoolName(name): result for name, result in v2(transfers).items()}
        verdicts[PoolName.KV] = v1(keys, page_indices(self.pools[PoolName.KV], pages))
        assert {name: len(result) for name, result in verdicts.items()} == dict.fromkeys(self.pools, 4)
        return verdicts


def everything(verdicts: dict[PoolName, list[bool]]) -> bool:
    return all(all(result) for result in verdicts.values())


def soon(condition: Callable[[], bool]) -> None:
    """Wait for full service."""
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nobody_hangs() -> bool:
    """Tell whether all workers that storage has kept are back: those who read and those who write."""
    engine = SharedEngine._engine
    return engine is not None and not any(engine._at_work.values())


def nothing(verdicts: dict[PoolName, list[bool]]) -> bool:
    return not any(any(result) for result in verdicts.values())


# LMCache #4991, sglang #28653, UCM #1220
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_costs_misses_only_and_is_over_when_its_cause_is(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    with fault.ready(tmp_path) as strike:
        service = Service(attach, strike.root)
        soon(lambda: everything(service.store(BEFORE)))
        caplog.clear()
        service.calls = 0

        with caplog.at_level(logging.WARNING), strike.begin():
            start = time.monotonic()
            claimed = service.store(MEANWHILE)
            service.restore(BEFORE)
            assert nothing(service.restore(NEVER))
            assert service.stored(NEVER) == 0
            service.stored(BEFORE)
            # One deadline for each call, and some time for a busy machine.
            assert time.monotonic() - start < (service.calls + 3) * DEADLINE_S
            at_return = {name: read_pages(pool) for name, pool in service.pools.items()}
        assert re.search(fault.says, caplog.text)
        assert len(caplog.messages) <= service.calls * len(service.pools)  # One line a batch and pool.

        # Full service again: workers that storage has kept need a moment to come back.
        soon(nobody_hangs)
        soon(lambda: everything(service.store(AFTERWARDS)))
        for name, pool in service.pools.items():
            assert read_pages(pool) == at_return[name]  # What hung has touched nothing.
        assert service.stored(AFTERWARDS) == 4
        assert everything(service.restore(AFTERWARDS))
        assert nothing(service.restore(NEVER))
        kept = service.restore(BEFORE)
        assert fault.loses or everything(kept)
        restored = service.restore(MEANWHILE)
        if fault.name != "another file system in its place":  # That one was told to be kept, and has gone.
            for name, verdicts in claimed.items():
                assert all(now for now, then in zip(restored[name], verdicts, strict=True) if then)
        service.backend.close()

        # Nothing is left behind, and what is said to be there is there.
        service.backend = service.attach()
        assert list(strike.root.glob("**/.tmp/*")) == []
        for keys in (BEFORE, MEANWHILE, AFTERWARDS):
            hits = service.stored(keys)
            restored = service.restore(keys)
            assert all(all(verdicts[:hits]) for verdicts in restored.values())
        assert service.stored(AFTERWARDS) == 4
        service.backend.close()


def test_every_fault_is_described_for_the_operator() -> None:
    described = (Path(__file__).parents[4] / "docs/faults.md").read_text(encoding="utf-8")
    matrix = described.partition("## The matrix")[2].partition("| more faults |")[0]
    rows = [line.split("|")[1] for line in matrix.splitlines() if line.startswith("| ")]
    names = [name.strip() for row in rows[1:] for name in row.split(",")]
    assert sorted(names) == sorted(fault.name for fault in FAULTS)
