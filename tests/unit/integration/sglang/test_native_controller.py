# SPDX-License-Identifier: MIT
"""SGLang's own controller on the native PosixStore of UCM's package, and on what either engine has stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ucm.testing import native_ucm
from ucm.testing.block_damage import flip_payload
from ucm.testing.hicache_stack import PATIENT, HicacheStack, dynamic_storage, hicache_stack
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MhaModel, MlaModel, Model, SwaModel
from ucm.testing.sglang_runtime import HicacheSettings
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    native_ucm.directory() is None, reason="UCM's own package is not installed; nox -s native does that"
)

MODEL_NAME = "org/model"
ENGINES: dict[str, dict[str, Any]] = {
    "embedded": {},
    "native": {"engine": "native", "native_package": str(native_ucm.directory())},
}
# Every pool costs seconds, in which the native store closes.
MODELS: dict[str, Model] = {
    "mha": MhaModel(),
    "mla": MlaModel(),
    "indexer-beside-mla": DsaModel(),
    "swa": SwaModel(),
    "deepseek-v4": DeepSeekV4Model(),
}


def serve(
    root: Path, model: Model, engine: str, *, seed: int, pages: int = 9
) -> AbstractContextManager[HicacheStack]:
    storage = dynamic_storage(root, **PATIENT, **ENGINES[engine])
    page_tokens = 256 if isinstance(model, DeepSeekV4Model) else 64
    settings = HicacheSettings(page_tokens=page_tokens, model_name=MODEL_NAME, **storage)
    return hicache_stack(model, settings, pages=pages, seed=seed)


def prompt(model: Model) -> list[int]:
    """Return a prompt of four pages."""
    return list(range(1, 4 * (256 if isinstance(model, DeepSeekV4Model) else 64) + 1))


def check_restart(root: Path, model: Model, first_engine: str, second_engine: str) -> None:
    """Store with one engine and restore with another."""
    tokens = prompt(model)
    with serve(root, model, first_engine, seed=1) as first:
        inserted = first.insert(tokens)
    with serve(root, model, second_engine, seed=2) as second:
        restored = second.restore(tokens)
        assert second.pools.guards.intact()
    assert restored.storage_tokens == len(tokens)
    for pool, found in restored.contents.items():
        assert_ends_alike(found, inserted[pool])


def assert_ends_alike(found: Sequence[object], expected: Sequence[object]) -> None:
    """Compare the pages of one pool; of a window or a state only the last ones are restored."""
    assert bool(found) == bool(expected)
    if found:
        assert found[-1] == expected[-1]
        assert len(found) < len(expected) or list(found) == list(expected)


@pytest.mark.parametrize(("first", "second"), [("native", "embedded"), ("embedded", "native")])
def test_one_engine_restores_what_the_other_has_stored(tmp_path: Path, first: str, second: str) -> None:
    check_restart(tmp_path, MambaModel(), first, second)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_restart_restores_every_pool_byte_for_byte(tmp_path: Path, model: Model) -> None:
    check_restart(tmp_path, model, "native", "native")


@pytest.mark.slow
def test_a_damaged_page_costs_what_comes_after_it(tmp_path: Path) -> None:
    model = MhaModel()
    tokens = prompt(model)
    with serve(tmp_path, model, "native", seed=1) as stack:
        stack.insert(tokens)
        hashes = stack.page_hashes(tokens)
    flip_payload(StoredBlocks(tmp_path, MODEL_NAME).primary(hashes[2]))
    with serve(tmp_path, model, "native", seed=2) as stack:
        restored = stack.restore(tokens)
    assert restored.storage_tokens == 2 * 64
