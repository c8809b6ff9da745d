# SPDX-License-Identifier: MIT
"""The CPU reference platform on older releases: it finds there all that it replaces.

`nox -s e2e -- mamba --sglang <release>` serves models with them, which takes too long for every run.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from sglang_cpu import launch

from ucm.testing.release_copy import environment, python
from ucm.testing.sglang_release import unpack_release

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 300

LOAD_PLUGINS = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_cpu import hooks
hooks.verify()
print(json.dumps(sorted(hooks._applied)))
"""

# Functions that lie elsewhere than in the newest release: of linear attention, and of DeepSeek V4.
GATES = "sglang.kernels.ops.attention.fla.fused_gdn_gating.fused_gdn_gating"
QUERIES = "sglang.kernels.ops.attention.dsv4.elementwise.fused_q_norm_rope"
PROJECTION = "sglang.kernels.ops.attention.dsv4.gemm.linear_bf16_fp32"


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.5.19", {GATES}), ("0.5.20", {GATES, QUERIES, PROJECTION}), ("0.5.21", {GATES, QUERIES})],
)
def test_the_cpu_platform_finds_what_it_replaces_in_an_older_release(
    version: str, expected: set[str], tmp_path: Path
) -> None:
    sglang = unpack_release(version, tmp_path)

    result = subprocess.run(  # noqa: S603 # Our own command.
        python("-c", LOAD_PLUGINS),
        env=launch.environment(environment(sglang)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout.splitlines()[-1])) >= expected
