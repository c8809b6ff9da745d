# SPDX-License-Identifier: MIT
"""Who writes which pool on which rank, in SGLang's opinion and ours, as JSON; run as a process of its own.

python ownership_probe.py STORAGE_DIRECTORY
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict

# A scheduler process loads its plugins from this module.
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.srt.plugins import load_plugins

from ucm.testing.rank_decisions import POOL_SETS, PoolSet, compare, data_parallel_config


def decisions(pool_set: PoolSet, backend: str, storage: str) -> dict[str, object]:
    return {pool: asdict(decided) for pool, decided in compare(pool_set, backend, storage).items()}


def main() -> None:
    storage = sys.argv[1]
    logging.disable(logging.CRITICAL)
    load_plugins()
    data_parallel = [data_parallel_config(storage, rank) for rank in (0, 1)]
    answer = {
        "unifiedcache": {
            kind: decisions(pool_set, "unifiedcache", storage) for kind, pool_set in POOL_SETS.items()
        },
        "file": {"mla, mha draft": decisions(POOL_SETS["mla, mha draft"], "file", storage)},
        "data parallel": [[config.dp_rank, config.tp_rank, config.tp_size] for config in data_parallel],
    }
    print(json.dumps(answer))  # noqa: T201 # The output is what this is for.


if __name__ == "__main__":
    main()
