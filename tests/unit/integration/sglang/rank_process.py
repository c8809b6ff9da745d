# SPDX-License-Identifier: MIT
"""One of two TP ranks that serve the same models: store, restart, restore, and lose a page on one rank only.

Arguments: rank, directory. Writes `<directory>/<rank>.json`: per model what this rank has seen.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ucm.testing.hicache_stack import PATIENT, HicacheStack, dynamic_storage, hicache_stack
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MlaModel, Model
from ucm.testing.pool_memory import fill_device_random
from ucm.testing.sglang_runtime import HicacheSettings
from ucm.testing.stored_blocks import StoredBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model at TP 2.

    Attributes:
        split_pools: Pools of which each rank has bytes of its own.
        lost_pool: The sidecar of which rank 1 loses the last page in the end.
    """

    model: Model
    page_tokens: int = 64
    split_pools: tuple[str, ...] = ()
    lost_pool: str


SCENARIOS = {
    "indexer-beside-mla": Scenario(model=DsaModel(), lost_pool="indexer"),
    "mamba-beside-mla": Scenario(
        model=MambaModel(anchor=MlaModel()), split_pools=("mamba",), lost_pool="mamba"
    ),
    "mamba-beside-mha": Scenario(model=MambaModel(), split_pools=("kv", "mamba"), lost_pool="mamba"),
    "deepseek-v4": Scenario(model=DeepSeekV4Model(), page_tokens=256, lost_pool="deepseek_v4_c4_state"),
}


def main(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    seen = {name: serve(scenario, rank, directory / name) for name, scenario in SCENARIOS.items()}
    (directory / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def serve(scenario: Scenario, rank: int, root: Path) -> dict[str, object]:
    model, page_tokens = scenario.model, scenario.page_tokens
    group = dist.new_group([0, 1])
    root.mkdir(exist_ok=True)
    settings = HicacheSettings(
        page_tokens=page_tokens,
        ranks={"tp_rank": rank},
        server_args={"tp_size": 2},
        **dynamic_storage(root, **PATIENT),
    )
    prompt = list(range(4 * page_tokens))
    with hicache_stack(model, settings, pages=8, seed=1, tp_group=group) as stack:
        for pool in scenario.split_pools:
            fill_device_random(stack.pools[pool], seed=100 + rank)
        inserted = stack.insert(prompt)
        dist.barrier()
    with hicache_stack(model, settings, pages=8, seed=2, tp_group=group) as stack:
        restored = stack.restore(prompt)
        blocks = StoredBlocks(root, settings.model_name).counts()
        dist.barrier()
        if rank == 1:
            lose_last_page(stack, scenario.lost_pool, prompt)
        dist.barrier()
    with hicache_stack(model, settings, pages=8, seed=3, tp_group=group) as stack:
        after_loss = stack.restore(prompt).storage_tokens
        dist.barrier()
    pools = restored.contents.items()
    return {
        "pages": restored.storage_tokens // page_tokens,
        "differing": [pool for pool, found in pools if found != inserted[pool][-len(found) :]],
        "blocks": blocks,
        "pages_after_loss": after_loss // page_tokens,
    }


def lose_last_page(stack: HicacheStack, sidecar: str, prompt: list[int]) -> None:
    pool = stack.backend._connector._sidecars[sidecar]
    pool.store.delete(pool._keys(stack.page_hashes(prompt)[-1:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
