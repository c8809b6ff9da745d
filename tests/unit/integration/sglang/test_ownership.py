# SPDX-License-Identifier: MIT
"""Our rule for who writes a pool, against the decisions of SGLang's real controllers.

A release that changes its rule fails here. The controllers run in a process of their own, which loads our
plugin as a scheduler does: SGLang decides by the backend's name who writes draft pools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBE = Path(__file__).with_name("ownership_probe.py")

OWN, SHARED = False, True

# Whether all TP ranks hold the same bytes; `docs/architecture.md` has this table in words.
REPLICATED = {
    "mha": {"kv": OWN, "draft": OWN},
    "mla, mha draft": {"kv": SHARED, "draft": OWN},
    "mla, mla draft": {"kv": SHARED, "draft": SHARED},
    "dsa": {"kv": SHARED, "indexer": SHARED, "draft": SHARED, "draft_indexer": SHARED},
    "mamba beside mha": {"kv": OWN, "mamba": OWN},
    "mamba beside mla": {"kv": SHARED, "mamba": OWN},
    "swa": {"kv": OWN, "swa": OWN, "draft_swa": OWN},
    "deepseek v4": {
        "kv": SHARED,
        "swa": SHARED,
        "draft_swa": SHARED,
        **{f"deepseek_v4_{ratio}": SHARED for ratio in ("c1", "c2", "c4", "c128")},
        **{f"deepseek_v4_{ratio}_indexer": SHARED for ratio in ("c1", "c2", "c4")},
        **{f"deepseek_v4_{ratio}_indexer_scale": SHARED for ratio in ("c1", "c2", "c4")},
        **{f"deepseek_v4_{ratio}_rope": SHARED for ratio in ("c4", "c128")},
        **{f"deepseek_v4_{state}_state": SHARED for state in ("c4", "c4_indexer", "c128")},
    },
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the controllers decide, and what we say."""
    answer = subprocess.run(  # noqa: S603 # The command is the tests' own.
        [sys.executable, str(PROBE), str(tmp_path_factory.mktemp("storage"))],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
            "SGLANG_PLUGINS": "ucm",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    observations: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return observations


@pytest.mark.parametrize(
    ("kind", "pool"), [(kind, pool) for kind, pools in REPLICATED.items() for pool in pools]
)
def test_sglang_lets_the_ranks_write_that_we_take_for_the_writers(
    seen: dict[str, Any], kind: str, pool: str
) -> None:
    decided = seen["unifiedcache"][kind][pool]

    assert decided["disputed"] == []
    assert decided["compared"] >= 63
    assert decided["replicated"] is REPLICATED[kind][pool]


def test_no_pool_of_these_models_is_left_out(seen: dict[str, Any]) -> None:
    pools = {kind: set(pools) for kind, pools in seen["unifiedcache"].items()}

    assert pools == {kind: set(pools) for kind, pools in REPLICATED.items()}


def test_for_another_backend_s_name_the_other_ranks_do_not_write_drafts_of_their_own(
    seen: dict[str, Any],
) -> None:
    # The reason for a hook and a patch of ours, and the proof that a dispute would be seen.
    pools = seen["file"]["mla, mha draft"]

    assert pools["kv"]["disputed"] == []
    assert pools["draft"]["disputed"] != []


def test_data_parallel_ranks_are_all_told_to_be_the_only_tp_rank(seen: dict[str, Any]) -> None:
    assert seen["data parallel"] == [[0, 0, 1], [1, 0, 1]]
