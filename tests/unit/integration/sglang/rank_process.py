# SPDX-License-Identifier: MIT
"""One of two ranks that serve the same models: store, restart, restore, and lose a page on one rank only.

Arguments: rank, directory. Writes `<directory>/<rank>.json`: per scenario what this rank has seen.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# A scheduler process loads its plugins from this module; ours knows who writes draft pools.
import sglang.srt.managers.scheduler  # noqa: F401
import torch.distributed as dist
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.plugins import load_plugins

from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.testing.hicache_stack import PATIENT, HicacheStack, hicache_stack, named_storage
from ucm.testing.host_pools import (
    DeepSeekV4Model,
    DsaModel,
    MambaModel,
    MhaModel,
    MlaModel,
    Model,
    RankGroups,
    host_pools,
)
from ucm.testing.pool_memory import fill_device_random, fill_random, page_indices, read_pages
from ucm.testing.sglang_runtime import HicacheSettings
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model on two ranks.

    Attributes:
        group: What the ranks are: `tp`, `cp` or `pp`.
        draft: A draft model beside it.
        split_pools: Pools of which each rank has bytes of its own.
        lost_pool: The sidecar of which rank 1 loses the last page in the end.
    """

    model: Model
    page_tokens: int = 64
    group: str = "tp"
    draft: Model | None = None
    split_pools: tuple[str, ...] = ()
    lost_pool: str

    def settings(self, rank: int, root: Path) -> HicacheSettings:
        # SGLang takes the place among CP ranks from their group.
        placed = {} if self.group == "cp" else {f"{self.group}_rank": rank}
        sized = {} if self.group == "cp" else {f"{self.group}_size": 2}
        return HicacheSettings(
            page_tokens=self.page_tokens,
            ranks=placed,
            server_args=sized,
            **named_storage(root, **PATIENT),
        )


SCENARIOS = {
    "indexer-beside-mla": Scenario(model=DsaModel(), lost_pool="indexer"),
    "mamba-beside-mla": Scenario(
        model=MambaModel(anchor=MlaModel()), split_pools=("mamba",), lost_pool="mamba"
    ),
    "mamba-beside-mha": Scenario(model=MambaModel(), split_pools=("kv", "mamba"), lost_pool="mamba"),
    "deepseek-v4": Scenario(model=DeepSeekV4Model(), page_tokens=256, lost_pool="deepseek_v4_c4_state"),
    "mha-draft-beside-mla": Scenario(
        model=MlaModel(), draft=MhaModel(layers=1), split_pools=("draft",), lost_pool="draft"
    ),
    "dsa-draft-beside-dsa": Scenario(model=DsaModel(), draft=DsaModel(layers=1), lost_pool="draft_indexer"),
    # The same logical keys name other layers, or other tokens, on the other rank.
    "indexer-beside-mla, pp": Scenario(
        model=DsaModel(), group="pp", split_pools=("kv", "indexer"), lost_pool="indexer"
    ),
    "mamba-beside-mla, pp": Scenario(
        model=MambaModel(anchor=MlaModel()), group="pp", split_pools=("kv", "mamba"), lost_pool="mamba"
    ),
    "indexer-beside-mla, cp": Scenario(
        model=DsaModel(), group="cp", split_pools=("kv", "indexer"), lost_pool="indexer"
    ),
}

SHARED_KEY_ROUNDS = 300


def main(rank: int, directory: Path) -> None:
    load_plugins()
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    seen: dict[str, Mapping[str, object]] = {
        name: serve(scenario, rank, directory / name) for name, scenario in SCENARIOS.items()
    }
    seen["shared keys"] = write_shared_keys(rank, directory / "shared-keys")
    (directory / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()


def serve(scenario: Scenario, rank: int, root: Path) -> dict[str, object]:
    model, page_tokens = scenario.model, scenario.page_tokens
    groups = RankGroups(**{scenario.group: dist.new_group([0, 1])})
    root.mkdir(exist_ok=True)
    settings = scenario.settings(rank, root)
    prompt = list(range(4 * page_tokens))
    with hicache_stack(model, settings, pages=8, seed=1, groups=groups, draft=scenario.draft) as stack:
        for pool in scenario.split_pools:
            fill_device_random(stack.pools[pool], seed=100 + rank)
        inserted = stack.insert(prompt)
        dist.barrier()
    with hicache_stack(model, settings, pages=8, seed=2, groups=groups, draft=scenario.draft) as stack:
        restored = stack.restore(prompt)
        blocks = StoredBlocks(root, settings.model_name).counts()
        dist.barrier()
        if rank == 1:
            lose_last_page(stack, scenario.lost_pool, prompt)
        dist.barrier()
    with hicache_stack(model, settings, pages=8, seed=3, groups=groups, draft=scenario.draft) as stack:
        after_loss = stack.restore(prompt).storage_tokens
        dist.barrier()
    pools = restored.contents.items()
    return {
        "pages": restored.storage_tokens // page_tokens,
        "differing": [pool for pool, found in pools if found != inserted[pool][-len(found) :]],
        "blocks": blocks,
        "pages_after_loss": after_loss // page_tokens,
    }


def write_shared_keys(rank: int, root: Path) -> dict[str, int]:
    """Store the same keys as the other process at the same time, as data-parallel ranks do, and load them.

    The two have other bytes under each key, as if they had computed them in other batches.

    Returns:
        In how many rounds both pages were stored, and came back whole, as one of the two.
    """
    root.mkdir(exist_ok=True)
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        dp_rank=rank,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="test/model",
        extra_config={"storage_backends": str(root), **PATIENT},
    )
    theirs = fill_random(host_pools(MhaModel()).anchor, seed=1 - rank)
    pool = host_pools(MhaModel()).anchor
    ours = fill_random(pool, seed=rank)
    backend = UnifiedCacheStore(config, pool)
    stored = whole = 0
    for number in range(SHARED_KEY_ROUNDS):
        keys = [f"{number}-a", f"{number}-b"]
        dist.barrier()
        stored += backend.batch_set_v1(keys, page_indices(pool, [0, 1])) == [True, True]
        dist.barrier()
        loaded = backend.batch_get_v1(keys, page_indices(pool, [2, 3])) == [True, True]
        first, second = read_pages(pool, [2, 3])
        whole += loaded and first in (ours[0], theirs[0]) and second in (ours[1], theirs[1])
    backend.close()
    return {"stored": stored, "whole": whole}


def lose_last_page(stack: HicacheStack, sidecar: str, prompt: list[int]) -> None:
    pool = stack.backend._connector._sidecars[sidecar]
    pool.store.delete(pool._keys(stack.page_hashes(prompt)[-1:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    # Without the interpreter's end, which aborts if one of gloo's threads still has to let go of a tensor.
    os._exit(0)
