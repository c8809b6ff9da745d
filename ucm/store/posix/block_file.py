# SPDX-License-Identifier: MIT
"""The stored form of a block: the payload, then a footer that proves it.

`docs/file-format.md` is the contract. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

from ucm.store.errors import BlockCorruptError
from ucm.store.host_memory import gil

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucm.store.interface import BlockKey, StoreSpec

FORMAT_VERSION = 1
MAGIC = b"UCMB"

# Magic, format version, key, identity, payload bytes, XXH3-64 of the payload.
_FIELDS = struct.Struct("<4sI16s16sQQ")
# XXH3-64 of the fields before it.
_CHECKSUM = struct.Struct("<Q")
FOOTER_BYTES = _FIELDS.size + _CHECKSUM.size

# While xxhash hashes more than that it lets go of the GIL: segments with which it should not are cut.
_HELD_PIECE_BYTES = 64 * 1024


def file_bytes(spec: StoreSpec) -> int:
    """Return the size of a whole block file."""
    return spec.block_bytes + FOOTER_BYTES


def payload_checksum(segments: Sequence[memoryview]) -> int:
    """Return XXH3-64 over the segments as if they were one."""
    if len(segments) == 1 and segments[0].nbytes <= _HELD_PIECE_BYTES:
        return xxh3_64_intdigest(segments[0])
    return checksum_of(hash_pieces(segments))


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """Return the same of a payload that comes piece by piece."""
    digest = xxh3_64()
    for piece in pieces:
        if piece.nbytes <= _HELD_PIECE_BYTES:
            digest.update(piece)
        else:
            since = time.monotonic()
            digest.update(piece)
            gil.is_back(piece.nbytes, since)
    return digest.intdigest()


def hash_pieces(segments: Sequence[memoryview]) -> Iterator[memoryview]:
    """Cut segments into what is best hashed at a time."""
    for segment in segments:
        if gil.lets_go(segment.nbytes):
            yield segment
            continue
        for start in range(0, segment.nbytes, _HELD_PIECE_BYTES):
            yield segment[start : start + _HELD_PIECE_BYTES]


def encode_footer(spec: StoreSpec, key: BlockKey, checksum: int) -> bytes:
    """Return the footer of a payload whose `payload_checksum` is `checksum`."""
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, key, spec.identity, spec.block_bytes, checksum)
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))


def check_footer(footer: bytes | memoryview, spec: StoreSpec, key: BlockKey, checksum: int | None) -> None:
    """Compare a footer with what this block must have.

    Args:
        footer: `FOOTER_BYTES` as read.
        spec: The store that wants the block.
        key: The key it asked for.
        checksum: Of the payload as read; None leaves the payload unchecked.

    Raises:
        BlockCorruptError: Anything differs; says what.
    """
    (footer_checksum,) = _CHECKSUM.unpack_from(footer, _FIELDS.size)
    magic, version, stored_key, identity, payload_bytes, stored_checksum = _FIELDS.unpack_from(footer)
    if magic != MAGIC:
        raise BlockCorruptError("no footer")
    if footer_checksum != xxh3_64_intdigest(footer[: _FIELDS.size]):
        raise BlockCorruptError("the footer is damaged")
    if version != FORMAT_VERSION:
        raise BlockCorruptError(f"format version {version}, expected {FORMAT_VERSION}")
    if stored_key != key:
        raise BlockCorruptError(f"it holds key {stored_key.hex()}")
    if identity != spec.identity:
        raise BlockCorruptError(f"identity {identity.hex()}, expected {spec.identity.hex()}")
    if payload_bytes != spec.block_bytes:
        raise BlockCorruptError(f"{payload_bytes} payload bytes, expected {spec.block_bytes}")
    if checksum is not None and checksum != stored_checksum:
        raise BlockCorruptError("the payload does not match its checksum")


def is_footer_of(
    footer: bytes | memoryview, spec: StoreSpec, key: BlockKey, checksum: int | None = None
) -> bool:
    """Tell whether it ends a block of `spec` under `key`; arguments like `check_footer`."""
    if len(footer) != FOOTER_BYTES:
        return False
    try:
        check_footer(footer, spec, key, checksum)
    except BlockCorruptError:
        return False
    return True


def encode_block(spec: StoreSpec, key: BlockKey, segments: Sequence[memoryview]) -> bytes:
    """Return the whole stored form in one piece."""
    return b"".join([*segments, encode_footer(spec, key, payload_checksum(segments))])


def decode_block(stored: bytes, spec: StoreSpec, key: BlockKey) -> memoryview:
    """Return the payload of a stored form.

    Raises:
        BlockCorruptError: It is not a good block of `spec` under `key`.
    """
    if len(stored) != file_bytes(spec):
        raise BlockCorruptError(f"{len(stored)} bytes long, expected {file_bytes(spec)}")
    whole = memoryview(stored)
    payload, footer = whole[: spec.block_bytes], whole[spec.block_bytes :]
    check_footer(footer, spec, key, payload_checksum([payload]))
    return payload
