# SPDX-License-Identifier: MIT
"""SGLang's real device and host pools, with our copies between them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from ucm.testing.hicache_stack import HicacheStack, hicache_stack
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MhaModel, MlaModel, SwaModel
from ucm.testing.pool_memory import fill_device_random, page_indices, read_device_page, read_page, read_pages
from ucm.testing.sglang_runtime import HicacheSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.pool_host import HostKVCache

    from ucm.testing.host_pools import Model

DEVICE_PAGES = 8
SOURCES, HOSTS, TARGETS = [1, 5, 2], [3, 0, 9], [4, 7, 1]

MODELS: dict[str, Model] = {
    "mha": MhaModel(),
    "mla": MlaModel(),
    "dsa": DsaModel(),
    "swa": SwaModel(),
    "mamba": MambaModel(),
    "deepseek_v4": DeepSeekV4Model(),
}
TRANSFERS = [
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=TRANSFERS, ids="-".join)
def transfer(request: pytest.FixtureRequest) -> tuple[str, str]:
    layout, io_backend = request.param
    return layout, io_backend


@pytest.fixture
def stack(model: str, transfer: tuple[str, str]) -> Iterator[HicacheStack]:
    layout, _ = transfer
    if model == "mamba" and layout == "layer_first":
        pytest.skip("SGLang has no layer_first host pool for mamba states")
    page_tokens = 256 if model == "deepseek_v4" else 64
    settings = HicacheSettings(layout=layout, page_tokens=page_tokens)
    with hicache_stack(MODELS[model], settings, pages=DEVICE_PAGES) as stack:
        yield stack


def layers_of(pool: HostKVCache) -> int:
    return int(pool.num_mamba_layers if hasattr(pool, "num_mamba_layers") else pool.layer_num)


def physical_pools(stack: HicacheStack) -> list[tuple[str, HostKVCache, object]]:
    return [
        (entry.name.value, entry.host_pool, entry.device_pool)
        for entry in stack.pools.group.entries
        if len(read_page(entry.host_pool, 0))
    ]


def test_pages_come_back_from_the_host_byte_for_byte(stack: HicacheStack, transfer: tuple[str, str]) -> None:
    _, io_backend = transfer
    for name, pool, device_pool in physical_pools(stack):
        device_before = [read_device_page(pool, page) for page in range(DEVICE_PAGES)]
        host_before = read_pages(pool)

        hosts = page_indices(pool, HOSTS)
        pool.backup_from_device_all_layer(device_pool, hosts, page_indices(pool, SOURCES), io_backend)
        fill_device_random(pool, seed=99)
        overwritten = [read_device_page(pool, page) for page in range(DEVICE_PAGES)]
        for layer in range(layers_of(pool)):
            pool.load_to_device_per_layer(device_pool, hosts, page_indices(pool, TARGETS), layer, io_backend)

        for page in range(DEVICE_PAGES):
            came_from = dict(zip(TARGETS, SOURCES, strict=True)).get(page)
            expected = overwritten[page] if came_from is None else device_before[came_from]
            assert read_device_page(pool, page) == expected, (name, page)
        untouched = [page for page in range(len(host_before)) if page not in HOSTS]
        assert read_pages(pool, untouched) == [host_before[page] for page in untouched], name
    assert stack.pools.guards.intact()


def test_each_host_page_holds_the_bytes_of_its_device_page(
    stack: HicacheStack, transfer: tuple[str, str]
) -> None:
    """The round trip alone would not notice layers that swap places twice."""
    _, io_backend = transfer
    for name, pool, device_pool in physical_pools(stack):
        pool.backup_from_device_all_layer(
            device_pool, page_indices(pool, HOSTS), page_indices(pool, SOURCES), io_backend
        )

        for source, host in zip(SOURCES, HOSTS, strict=True):
            assert layers_on_host(pool, host) == layers_on_device(pool, source), name


def layers_on_device(pool: HostKVCache, page: int) -> list[bytes]:
    """The page's bytes, cut into the layers of each of its kinds of state."""
    whole = read_device_page(pool, page)
    bounds = list(accumulate((len(layer) for layer in layers_on_host(pool, 0)), initial=0))
    return [whole[start:end] for start, end in pairwise(bounds)]


def layers_on_host(pool: HostKVCache, page: int) -> list[bytes]:
    """The same, through the views that SGLang lays over its host buffers."""
    if hasattr(pool, "num_mamba_layers"):
        buffers = [pool.temporal_buffer, *pool.conv_buffer]
        views = [buffer[page, layer] for buffer in buffers for layer in range(layers_of(pool))]
    elif hasattr(pool, "data_refs") and pool.layout == "page_first_direct":
        # SGLang lays no views over this one: nothing of its own would use them.
        views = [pool.kv_buffer[page, layer] for layer in range(layers_of(pool))]
    else:
        names = ("k_data_refs", "v_data_refs", "data_refs", "index_k_data_refs")
        refs = [ref for name in names for ref in getattr(pool, name, ())]
        # A view has a row per page, or one per token.
        rows = [pool.page_size if ref.shape[0] == pool.size else 1 for ref in refs]
        views = [ref[page * n : (page + 1) * n] for ref, n in zip(refs, rows, strict=True)]
    return [bytes(view.contiguous().view(-1).view(torch.uint8).numpy()) for view in views]
