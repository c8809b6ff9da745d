# SPDX-License-Identifier: MIT
"""The copies against loops that say what they mean, on tensors of both tiers' shapes."""

from __future__ import annotations

import pytest
import torch
from sglang_cpu.hicache import transfer

LAYERS, PAGE_TOKENS, PAGES = 3, 4, 6
TOKENS = PAGES * PAGE_TOKENS
ITEM_SHAPE = (2, 5)
ITEM_BYTES = 2 * 5 * 2
DEVICE_PAGES, HOST_PAGES = [4, 1, 5], [0, 3, 2]


def tokens_of(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def device_layers() -> list[torch.Tensor]:
    return [random(TOKENS, *ITEM_SHAPE) for _ in range(LAYERS)]


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


SOURCE, TARGET = tokens_of(DEVICE_PAGES), tokens_of(HOST_PAGES)


def test_kernel_copies_of_one_layer_move_items_and_nothing_else() -> None:
    source, target = random(TOKENS, *ITEM_SHAPE), random(TOKENS, *ITEM_SHAPE)
    expected = target.clone()
    for s, t in zip(SOURCE, TARGET, strict=True):
        expected[t] = source[s]

    transfer.transfer_kv_per_layer_mla(source, target, SOURCE, TARGET, ITEM_BYTES)

    assert torch.equal(target, expected)


def test_kernel_copies_to_layer_first_hosts_go_layer_by_layer() -> None:
    k, v = device_layers(), device_layers()
    host_k, host_v = random(LAYERS, TOKENS, *ITEM_SHAPE), random(LAYERS, TOKENS, *ITEM_SHAPE)
    expected = [host_k.clone(), host_v.clone()]
    for layer in range(LAYERS):
        expected[0][layer, TARGET] = k[layer][SOURCE]
        expected[1][layer, TARGET] = v[layer][SOURCE]

    transfer.transfer_kv_all_layer(
        addresses(k),
        addresses(list(host_k)),
        addresses(v),
        addresses(list(host_v)),
        SOURCE,
        TARGET,
        item_size=ITEM_BYTES,
        num_layers=LAYERS,
    )

    assert torch.equal(host_k, expected[0])
    assert torch.equal(host_v, expected[1])


def test_kernel_copies_to_page_first_hosts_put_all_layers_of_an_item_together() -> None:
    k, v = device_layers(), device_layers()
    host_k, host_v = random(TOKENS, LAYERS, *ITEM_SHAPE), random(TOKENS, LAYERS, *ITEM_SHAPE)
    expected = [host_k.clone(), host_v.clone()]
    for layer in range(LAYERS):
        expected[0][TARGET, layer] = k[layer][SOURCE]
        expected[1][TARGET, layer] = v[layer][SOURCE]

    transfer.transfer_kv_all_layer_lf_pf(
        addresses(k),
        host_k,
        addresses(v),
        host_v,
        SOURCE,
        TARGET,
        item_size=ITEM_BYTES,
        dst_layout_dim=LAYERS * ITEM_BYTES,
        num_layers=LAYERS,
    )

    assert torch.equal(host_k, expected[0])
    assert torch.equal(host_v, expected[1])


def test_kernel_copies_from_page_first_hosts_take_one_layer() -> None:
    host_k, host_v = random(TOKENS, LAYERS, *ITEM_SHAPE), random(TOKENS, LAYERS, *ITEM_SHAPE)
    k, v = random(TOKENS, *ITEM_SHAPE), random(TOKENS, *ITEM_SHAPE)
    expected = [k.clone(), v.clone()]
    expected[0][SOURCE] = host_k[TARGET, 1]
    expected[1][SOURCE] = host_v[TARGET, 1]

    transfer.transfer_kv_per_layer_pf_lf(
        host_k,
        k,
        host_v,
        v,
        TARGET,
        SOURCE,
        layer_id=1,
        item_size=ITEM_BYTES,
        src_layout_dim=LAYERS * ITEM_BYTES,
    )

    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])


def test_direct_copies_move_tokens_between_tensors() -> None:
    source, target = device_layers(), list(random(LAYERS, TOKENS, *ITEM_SHAPE))
    expected = [tensor.clone() for tensor in target]
    for layer in range(LAYERS):
        expected[layer][TARGET] = source[layer][SOURCE]

    transfer.transfer_kv_direct(source, target, SOURCE, TARGET, PAGE_TOKENS)

    assert all(map(torch.equal, target, expected))


def test_direct_copies_to_page_first_hosts_put_all_layers_of_a_page_together() -> None:
    k, v = device_layers(), device_layers()
    shape = (PAGES, LAYERS, PAGE_TOKENS, *ITEM_SHAPE)
    host_k, host_v = random(*shape), random(*shape)
    expected = [host_k.clone(), host_v.clone()]
    for device_page, host_page in zip(DEVICE_PAGES, HOST_PAGES, strict=True):
        rows = slice(device_page * PAGE_TOKENS, (device_page + 1) * PAGE_TOKENS)
        for layer in range(LAYERS):
            expected[0][host_page, layer] = k[layer][rows]
            expected[1][host_page, layer] = v[layer][rows]

    transfer.transfer_kv_all_layer_direct_lf_pf([*k, *v], [host_k, host_v], SOURCE, TARGET, PAGE_TOKENS)

    assert torch.equal(host_k, expected[0])
    assert torch.equal(host_v, expected[1])


def test_direct_copies_from_page_first_hosts_take_one_layer() -> None:
    host = random(PAGES, LAYERS, PAGE_TOKENS, *ITEM_SHAPE)
    device = random(TOKENS, *ITEM_SHAPE)
    expected = device.clone()
    for device_page, host_page in zip(DEVICE_PAGES, HOST_PAGES, strict=True):
        expected[device_page * PAGE_TOKENS : (device_page + 1) * PAGE_TOKENS] = host[host_page, 2]

    transfer.transfer_kv_per_layer_direct_pf_lf([host], [device], TARGET, SOURCE, 2, PAGE_TOKENS)

    assert torch.equal(device, expected)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_no_indices_move_nothing(index_type: torch.dtype) -> None:
    source, target = random(TOKENS, *ITEM_SHAPE), random(TOKENS, *ITEM_SHAPE)
    before, none = target.clone(), torch.empty(0, dtype=index_type)

    transfer.transfer_kv_per_layer_mla(source, target, none, none, ITEM_BYTES)
    transfer.transfer_kv_direct([source], [target], none, none, PAGE_TOKENS)

    assert torch.equal(target, before)
