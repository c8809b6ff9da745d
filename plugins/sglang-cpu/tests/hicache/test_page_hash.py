# SPDX-License-Identifier: MIT
"""Page names must be those of SGLang's compiled hash: stored caches outlive the machine that wrote them."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
from array import array

import pytest
from sglang_cpu.hicache.page_hash import HASHER


def test_digests_are_those_of_the_compiled_hash() -> None:
    # Written down from SGLang 0.5.23's own extension.
    assert HASHER.get_hash(array("q", range(130)), 130, 1, False, None, 64) == [
        "fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5",
        "1617a7384eff5e9135098c24794739af884859cdb17c1a61a834e8d6ac997351",
        "7e31821709bdd26923894e3822625e6280d8b7d509cbe35a1b2f5a8b784e0623",
    ]
    assert (
        HASHER.get_hash(array("q", [5, 2**33, 7]), 2, 2, True, bytes(32))
        == "18f73b6bd9e9ab20121124180dc83bb8c79a461c72cd8d6036c73a78825eb844"
    )


def test_a_page_continues_the_chain_of_the_one_before() -> None:
    pages = HASHER.get_hash([1, 2, 3, 4], 4, 1, False, None, 2)

    assert HASHER.get_hash([3, 4], 2, 1, False, bytes.fromhex(pages[0])) == pages[1]
    assert pages[0] == hashlib.sha256(struct.pack("<2I", 1, 2)).hexdigest()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="SGLang compiles its hash with g++")
def test_random_tokens_hash_as_in_the_compiled_extension() -> None:
    from sglang.srt.mem_cache.cpp_utils.native_hash import _load_native_hash_module

    compiled = _load_native_hash_module()
    draw = random.Random(1)  # noqa: S311 - nothing secret.
    for _ in range(200):
        units, is_bigram = draw.randrange(200), draw.random() < 0.4
        width = 2 if is_bigram else draw.choice([1, 2])
        tokens = (units + 1 if units else 0) if is_bigram else units * width
        largest = draw.choice([500, 2**32 - 1, 2**40])
        raw = array("q", [draw.randrange(largest) for _ in range(tokens)])
        prior = draw.choice([None, draw.randbytes(32)])
        arguments = (raw, units, width, is_bigram, prior, draw.choice([None, 1, 7, 64]))

        assert HASHER.get_hash(*arguments) == compiled.get_hash(*arguments)
