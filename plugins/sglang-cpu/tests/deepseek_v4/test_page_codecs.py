# SPDX-License-Identifier: MIT
"""The page formats, against the readers and writers that SGLang ships for its own tests and fallbacks."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch
from sglang.test.kernels.deepseek_v4.k_cache_reference import dequantize_k_cache_paged_ref, set_k_and_s_torch
from sglang_cpu.deepseek_v4 import codecs

PAGES = 3


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def kv_pages(page_size: int) -> torch.Tensor:
    return torch.zeros(PAGES, KVLayout.V4.page_bytes(page_size), dtype=torch.uint8)


@pytest.mark.parametrize("page_size", [2, 64, 256])
def test_stored_kv_reads_the_same_through_sglangs_reference(
    generator: torch.Generator, page_size: int
) -> None:
    slots = torch.randperm(PAGES * page_size, generator=generator)[:5]
    pages = kv_pages(page_size)
    codecs.store_kv(pages, slots, torch.randn(5, 512, generator=generator) * 3, page_size)
    expected = dequantize_k_cache_paged_ref(pages, slots, page_size).squeeze(1)
    assert torch.equal(codecs.load_kv(pages, slots, page_size).to(torch.bfloat16), expected)


def test_stored_kv_has_the_bytes_that_sglangs_reference_writes(generator: torch.Generator) -> None:
    kv, slots = torch.randn(7, 512, generator=generator), torch.randperm(PAGES * 64, generator=generator)[:7]
    tiles = kv[:, :448].view(7, 7, 64)
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(-1) / 448)))
    pack = NopeFp8RopeBf16Pack(
        k_nope_fp8=(tiles / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(7, 448),
        k_rope_bf16=kv[:, 448:].to(torch.bfloat16).contiguous(),
        scale_k_nope_ue8m0=(torch.log2(scale) + 127).to(torch.uint8),
    )
    expected, pages = kv_pages(64), kv_pages(64)
    set_k_and_s_torch(expected, slots, pack, 64)
    codecs.store_kv(pages, slots, kv, 64)
    assert torch.equal(pages, expected)


def test_a_scale_is_the_smallest_power_of_two_that_fits() -> None:
    pages = kv_pages(64)
    kv = torch.zeros(3, 512)
    kv[:, 0] = torch.tensor([448.0, 449.0, 224.0])
    codecs.store_kv(pages, torch.arange(3), kv, 64)
    assert pages[0, 64 * codecs.ROW_BYTES :: codecs.SCALE_BYTES][:3].tolist() == [127, 128, 126]


def test_values_are_kept_to_one_part_in_sixteen(generator: torch.Generator) -> None:
    kv, pages = torch.randn(64, 512, generator=generator), kv_pages(64)
    codecs.store_kv(pages, torch.arange(64), kv, 64)
    error = (codecs.load_kv(pages, torch.arange(64), 64) - kv).abs()
    magnitude = kv[:, :448].view(64, 7, 64).abs().amax(-1, keepdim=True).expand(-1, -1, 64).reshape(64, 448)
    assert (error[:, :448] <= kv[:, :448].abs() / 16 + magnitude * 2**-15).all()
    assert (error[:, 448:] <= kv[:, 448:].abs() * 2**-8).all()


def test_rows_without_a_slot_are_dropped(generator: torch.Generator) -> None:
    pages = kv_pages(64)
    codecs.store_kv(pages, torch.tensor([-1, -1]), torch.randn(2, 512, generator=generator), 64)
    assert not pages.any()


def test_index_pages_score_the_same_in_sglangs_torch_fallback(generator: torch.Generator) -> None:
    page_size, tokens, heads = 64, 100, 4
    pages = torch.zeros(PAGES, page_size * 132, dtype=torch.uint8)
    page_table = torch.tensor([[2, 0]])
    slots = (page_table[0].repeat_interleave(page_size) * page_size + torch.arange(page_size).repeat(2))[
        :tokens
    ]
    codecs.store_index(pages, slots, torch.randn(tokens, 128, generator=generator), page_size)
    query = torch.randn(1, 1, heads, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.rand(1, heads, generator=generator)
    expected = fp8_paged_mqa_logits_torch(
        query,
        pages.view(PAGES, page_size, 1, 132),
        weights,
        torch.tensor([tokens]),
        page_table,
        None,
        128,
        clean_logits=False,
    )[0, :tokens]
    keys, scales = codecs.load_index(pages, slots, page_size)
    scores = (torch.relu(query[0, 0].double() @ keys.T) * weights[0].double().unsqueeze(1)).sum(0) * scales
    # The fallback rounds its products to bfloat16.
    torch.testing.assert_close(scores.float(), expected.float(), rtol=2e-2, atol=0.3)
