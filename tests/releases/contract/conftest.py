# SPDX-License-Identifier: MIT
"""What holds for every supported SGLang; run by `scripts/check_patches.py` once for each.

The SGLang to test is first on the path, patched, in a process of its own. Each test finds out from its types
what it has. `UCM_TEST_RELEASE` names it, for messages and so that nobody collects these tests by accident.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ucm.testing.release_pools import ReleaseController, ReleasePools

if "UCM_TEST_RELEASE" in os.environ:
    from ucm.testing import release_environment

    release_environment.prepare()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def pools() -> Callable[..., ReleasePools]:
    """Build the pools of one kind of model; skips where the release has no such pools."""
    from ucm.testing.release_pools import build_pools

    def build(kind: str, layout: str = "page_first") -> ReleasePools:
        built = build_pools(kind, layout)
        if built is None:
            pytest.skip(f"this SGLang has no pools of kind {kind}")
        return built

    return build


@pytest.fixture(scope="session")
def rendezvous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in which this process's groups of ranks meet."""
    return tmp_path_factory.mktemp("ranks") / "rendezvous"


@pytest.fixture
def plain_controller(pools: Callable[..., ReleasePools], rendezvous: Path) -> Iterator[ReleaseController]:
    """The controller of models with KV only; without storage yet."""
    from ucm.testing.release_pools import release_controller

    with release_controller(pools("mha"), rendezvous, several_pools=False) as running:
        yield running


@pytest.fixture
def hybrid_controller(rendezvous: Path) -> Iterator[ReleaseController]:
    """The controller of models with several pools, over KV and linear-attention states; no storage yet."""
    from ucm.testing.release_pools import build_pools, has_controller_of_several_pools, release_controller

    if not has_controller_of_several_pools():
        pytest.skip("this SGLang has one controller only")
    built = build_pools("mamba", "page_first") or build_pools("mamba", "page_first_direct")
    assert built
    with release_controller(built, rendezvous, several_pools=True) as running:
        yield running


@pytest.fixture
def controller(request: pytest.FixtureRequest) -> ReleaseController:
    """The controller that has to do with the most pools."""
    from ucm.testing.release_pools import has_controller_of_several_pools

    name = "hybrid_controller" if has_controller_of_several_pools() else "plain_controller"
    running: ReleaseController = request.getfixturevalue(name)
    return running


@pytest.fixture
def storage(tmp_path: Path) -> dict[str, Any]:
    """An extra config that stores below a directory of this test's own, with patient deadlines."""
    deadlines = dict.fromkeys(("lookup_timeout_s", "load_timeout_s", "dump_timeout_s"), 60)
    return {"storage_backends": str(tmp_path / "storage"), **deadlines}
