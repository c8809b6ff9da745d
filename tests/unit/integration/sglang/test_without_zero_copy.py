# SPDX-License-Identifier: MIT
"""Plain `dynamic` loading without `"interface_v1": 1`: SGLang copies the anchor through its generic calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.testing.hicache_stack import PATIENT, dynamic_storage, hicache_stack
from ucm.testing.host_pools import DeepSeekV4Model, MambaModel, MhaModel, MlaModel
from ucm.testing.sglang_runtime import HicacheSettings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ucm.testing.hicache_stack import HicacheStack
    from ucm.testing.host_pools import Model


def serve(
    root: Path, model: Model, *, page_tokens: int, interface_v1: int, seed: int
) -> AbstractContextManager[HicacheStack]:
    storage = dynamic_storage(root, interface_v1=interface_v1, **PATIENT)
    settings = HicacheSettings(page_tokens=page_tokens, **storage)
    return hicache_stack(model, settings, pages=8, seed=seed)


@pytest.mark.parametrize(("writer", "reader"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("model", "page_tokens"),
    [(MhaModel(), 64), (MlaModel(), 64), (MambaModel(), 64), (DeepSeekV4Model(), 256)],
    ids=["mha", "mla", "mamba", "v4"],
)
def test_pages_are_restored_whichever_way_they_were_stored(
    tmp_path: Path, model: Model, page_tokens: int, writer: int, reader: int
) -> None:
    prefix = list(range(1, 3 * page_tokens + 1))
    with serve(tmp_path, model, page_tokens=page_tokens, interface_v1=writer, seed=1) as stack:
        inserted = stack.insert(prefix)

    with serve(tmp_path, model, page_tokens=page_tokens, interface_v1=reader, seed=2) as stack:
        restored = stack.restore(prefix)

    assert restored.storage_tokens == len(prefix)
    for pool, pages in restored.contents.items():
        assert pages == inserted[pool][len(inserted[pool]) - len(pages) :], pool
