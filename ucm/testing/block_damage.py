# SPDX-License-Identifier: MIT
"""Ways in which a stored block can go wrong, done to the file itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.store.interface import BlockKey, StoreSpec
from ucm.store.posix.block_file import FOOTER_BYTES, encode_block

if TYPE_CHECKING:
    from pathlib import Path

# After the magic, the format version and the key; see docs/file-format.md.
_IDENTITY = slice(24, 40)


def flip_payload(block: Path) -> None:
    """Change one byte in the middle of the payload."""
    _flip(block, (block.stat().st_size - FOOTER_BYTES) // 2)


def flip_footer(block: Path) -> None:
    """Change one byte of the footer."""
    _flip(block, block.stat().st_size - FOOTER_BYTES // 2)


def cut(block: Path) -> None:
    """Drop the second half."""
    with block.open("r+b") as file:
        file.truncate(block.stat().st_size // 2)


def empty(block: Path) -> None:
    """Drop everything but the name."""
    block.write_bytes(b"")


def zero(block: Path) -> None:
    """Keep the length only, as a crash of the machine may."""
    block.write_bytes(bytes(block.stat().st_size))


def remove(block: Path) -> None:
    """Remove the file."""
    block.unlink()


def forge(block: Path) -> None:
    """Change the sign of about every number in the payload, and make the footer fit.

    No reader can tell that such a block is wrong, so what it holds must show in the model's output.
    """
    payload = bytearray(block.read_bytes()[:-FOOTER_BYTES])
    # The high byte of little-endian bfloat16; for float32, that and a byte of the fraction.
    payload[1::2] = bytes(byte ^ 0x80 for byte in payload[1::2])
    _replace_payload(block, payload)


def transplant(source: Path, block: Path) -> None:
    """Give `block` the payload of another one of its pool, and make the footer fit.

    Like `forge`, for pools in which the sign of a number is not a bit of its own.
    """
    _replace_payload(block, bytearray(source.read_bytes()[:-FOOTER_BYTES]))


def _replace_payload(block: Path, payload: bytearray) -> None:
    footer = block.read_bytes()[-FOOTER_BYTES:]
    spec = StoreSpec(namespace="", segment_bytes=(len(payload),), identity=footer[_IDENTITY])
    key = BlockKey(bytes.fromhex(block.name))
    block.write_bytes(encode_block(spec, key, [memoryview(payload)]))


def _flip(block: Path, offset: int) -> None:
    with block.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))
