# SPDX-License-Identifier: MIT
"""Paths of blocks: a golden one, and the rules that hold for all of them."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.store import BlockKey, StoreConfigError
from ucm.store.posix.layout import BlockLayout, is_shard_name, key_of
from ucm.testing import store_conformance as conformance

KEY = BlockKey(bytes.fromhex("00112233445566778899aabbccddeeff"))
keys = st.binary(min_size=16, max_size=16).map(BlockKey)


def test_a_block_is_below_its_namespace_and_shard() -> None:
    layout = BlockLayout(["/mnt/a"], "sglang_v2/swa_6589440x1")
    assert layout.path(KEY) == "/mnt/a/sglang_v2/swa_6589440x1/001/00112233445566778899aabbccddeeff"


def test_the_empty_namespace_is_the_root_itself() -> None:
    assert BlockLayout(["/mnt/a"], "").path(KEY) == "/mnt/a/001/00112233445566778899aabbccddeeff"


def test_the_root_of_a_key_is_part_of_the_format() -> None:
    layout = BlockLayout(["/a", "/b", "/c"], "n")
    assert [layout.path(BlockKey(bytes(12) + bytes([n, 0, 0, 0])))[:2] for n in range(4)] == [
        "/a",
        "/b",
        "/c",
        "/a",
    ]


@given(keys, st.integers(1, 9))
def test_every_key_has_one_path_that_gives_it_back(key: BlockKey, roots: int) -> None:
    layout = BlockLayout([f"/root{n}" for n in range(roots)], "ns/pool")
    path = PurePosixPath(layout.path(key))
    assert key_of(path.name) == key
    assert is_shard_name(path.parent.name)
    assert str(path.parent.parent) == layout.directories[layout.root_index(key)]


def test_several_roots_share_the_keys_evenly() -> None:
    layout = BlockLayout(["/a", "/b", "/c"], "")
    roots = [layout.root_index(conformance.key_of(number)) for number in range(3000)]
    assert all(900 < roots.count(root) < 1100 for root in range(3))


@given(keys)
def test_a_file_in_preparation_is_never_taken_for_a_block(key: BlockKey) -> None:
    temp = PurePosixPath(BlockLayout(["/a"], "n").temp_path(key, "place-1-token-0"))
    assert not is_shard_name(temp.parent.name)
    assert key_of(temp.name) is None


@pytest.mark.parametrize("name", ["", "x", "0" * 30 + "AF", "0" * 31, "0" * 33, "0" * 31 + "g"])
def test_a_name_that_is_not_32_lower_case_hex_digits_is_no_block(name: str) -> None:
    assert key_of(name) is None


@pytest.mark.parametrize(
    "namespace", ["/a", "a//b", "a/", "..", "a/../b", ".", ".ucm", "abc", "a/0f3", "a\0b"]
)
def test_a_namespace_that_could_be_mistaken_is_refused(namespace: str) -> None:
    with pytest.raises(StoreConfigError, match="namespace"):
        BlockLayout(["/mnt/a"], namespace)
