# SPDX-License-Identifier: MIT
"""The stored form of a block: golden bytes, and no change of any byte goes unseen."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from ucm.store import BlockCorruptError, BlockKey, StoreSpec
from ucm.store.posix.block_file import (
    FOOTER_BYTES,
    check_footer,
    decode_block,
    encode_block,
    encode_footer,
    is_footer_of,
    payload_checksum,
)

KEY = BlockKey(bytes(range(16)))
IDENTITY = bytes(range(16, 32))
SPEC = StoreSpec("pool_4x2", (4, 4), IDENTITY)

GOLDEN = bytes.fromhex(
    "6162636465666768"  # Payload.
    "55434d42"  # "UCMB"
    "01000000"  # Format version.
    "000102030405060708090a0b0c0d0e0f"  # Key.
    "101112131415161718191a1b1c1d1e1f"  # Identity.
    "0800000000000000"  # Payload bytes.
    "8364a94268a7456f"  # XXH3-64 of the payload.
    "2006f7ce00f9fbc6"  # XXH3-64 of the footer's 56 bytes before it.
)


def segments_of(payload: bytes, sizes: tuple[int, ...]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(payload)[start : start + size])
        start += size
    return views


def test_the_stored_form_is_these_bytes() -> None:
    assert encode_block(SPEC, KEY, segments_of(b"abcdefgh", (4, 4))) == GOLDEN


def test_the_golden_bytes_decode_to_their_payload() -> None:
    assert decode_block(GOLDEN, SPEC, KEY).tobytes() == b"abcdefgh"


@pytest.mark.parametrize("footer", [b"", GOLDEN[8:-1], GOLDEN[8:] + b"x"])
def test_a_footer_of_another_length_is_none(footer: bytes) -> None:
    assert not is_footer_of(footer, SPEC, KEY)


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_a_payload_survives_whatever_its_segments(payload: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(payload) - 1)), max_size=5)))
    borders = [0, *[cut for cut in cuts if cut < len(payload)], len(payload)]
    sizes = tuple(end - start for start, end in itertools.pairwise(borders))
    spec = StoreSpec("x", sizes, IDENTITY)
    assert decode_block(encode_block(spec, KEY, segments_of(payload, sizes)), spec, KEY) == payload


@given(st.integers(0, 8 * len(GOLDEN) - 1))
def test_no_flipped_bit_goes_unseen(bit: int) -> None:
    damaged = bytearray(GOLDEN)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockCorruptError):
        decode_block(bytes(damaged), SPEC, KEY)


@given(st.binary(max_size=3 * len(GOLDEN)).filter(lambda stored: stored != GOLDEN))
def test_arbitrary_bytes_are_no_block(stored: bytes) -> None:
    with pytest.raises(BlockCorruptError):
        decode_block(stored, SPEC, KEY)


@given(st.lists(st.integers(1, 600_000), min_size=1, max_size=3))
def test_the_checksum_is_that_of_the_whole_payload(sizes: list[int]) -> None:
    payload = (bytes(range(251)) * (sum(sizes) // 251 + 1))[: sum(sizes)]
    assert payload_checksum(segments_of(payload, tuple(sizes))) == xxh3_64_intdigest(payload)


@pytest.mark.parametrize(
    ("spec", "key", "reason"),
    [
        (SPEC, BlockKey(bytes(16)), "it holds key"),
        (StoreSpec("pool_4x2", (4, 4), bytes(16)), KEY, "identity"),
        (StoreSpec("pool_9", (9,), IDENTITY), KEY, "8 payload bytes, expected 9"),
    ],
)
def test_a_good_footer_of_something_else_is_refused_with_the_reason(
    spec: StoreSpec, key: BlockKey, reason: str
) -> None:
    with pytest.raises(BlockCorruptError, match=reason):
        check_footer(GOLDEN[-FOOTER_BYTES:], spec, key, None)


def test_a_later_format_version_is_refused_with_both_versions() -> None:
    fields = bytearray(GOLDEN[-FOOTER_BYTES:-8])
    fields[4] = 2
    footer = bytes(fields) + xxh3_64_intdigest(bytes(fields)).to_bytes(8, "little")
    with pytest.raises(BlockCorruptError, match="version 2, expected 1"):
        check_footer(footer, SPEC, KEY, None)


def test_the_footer_alone_tells_whose_block_it_is() -> None:
    footer = encode_footer(SPEC, KEY, checksum=0)
    assert is_footer_of(footer, SPEC, KEY)
    assert not is_footer_of(footer, StoreSpec("pool_4x2", (4, 4), bytes(16)), KEY)
