# SPDX-License-Identifier: MIT
"""What docs/file-format.md says, byte by byte, of files that the store itself has written."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ucm.store import Block, BlockKey, BlockStatus, StoreSpec
from ucm.store.factory import StoreConfig, claim_identity
from ucm.store.posix.block_file import FOOTER_BYTES, FORMAT_VERSION, MAGIC
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore

DOCUMENT = Path(__file__).parents[4] / "docs/file-format.md"
KEY = BlockKey(bytes(range(16)))
SPEC = StoreSpec("sglang_v2/pool_4x2", (4, 4), bytes(range(16, 32)))
BLOCK = bytes.fromhex(
    "6162636465666768"  # Payload.
    "55434d42"  # "UCMB"
    "01000000"  # Format version.
    "000102030405060708090a0b0c0d0e0f"  # Key.
    "101112131415161718191a1b1c1d1e1f"  # Identity.
    "0800000000000000"  # Payload bytes.
    "8364a94268a7456f"  # XXH3-64 of the payload.
    "2006f7ce00f9fbc6"  # XXH3-64 of the footer's 56 bytes before it.
)


def test_the_store_writes_these_bytes_to_this_path_and_nothing_else(tmp_path: Path) -> None:
    store = PosixStore(SPEC, PosixStoreConfig((str(tmp_path),)))
    assert store.dump([Block(KEY, [memoryview(b"abcd"), memoryview(b"efgh")])]) == [BlockStatus.DONE]
    store.close()
    files = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert files == {"sglang_v2/pool_4x2/000/000102030405060708090a0b0c0d0e0f": BLOCK}


def test_the_store_reads_these_bytes_from_this_path(tmp_path: Path) -> None:
    path = tmp_path / "sglang_v2/pool_4x2/000/000102030405060708090a0b0c0d0e0f"
    path.parent.mkdir(parents=True)
    path.write_bytes(BLOCK)
    store = PosixStore(SPEC, PosixStoreConfig((str(tmp_path),), accept_unverified=False))
    segments = [memoryview(bytearray(4)), memoryview(bytearray(4))]
    assert store.load([Block(KEY, segments)]) == [BlockStatus.DONE]
    assert b"".join(segments) == b"abcdefgh"
    store.close()


def test_an_identity_record_is_this_file(tmp_path: Path) -> None:
    settings = StoreConfig("UcmPosixStore", PosixStoreConfig((str(tmp_path),)))
    claim_identity(settings, "sglang_v2/pool_4x2 model", {"dtype": "bfloat16", "component_bytes": (4, 4)})
    [path] = (tmp_path / ".ucm/identity").iterdir()
    assert path.name == "sglang_v2_pool_4x2_model-2b6dd9730f2b5b87.json"
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "name": "sglang_v2/pool_4x2 model",
        "record": {"component_bytes": [4, 4], "dtype": "bfloat16"},
    }


def test_the_document_describes_this_version() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document.startswith(f"# File format, version {FORMAT_VERSION}\n")
    assert f"then a footer of {FOOTER_BYTES} bytes" in document
    assert f"`{MAGIC.decode()}`" in document
    assert re.search(rf"\| Format version: {FORMAT_VERSION} \|", document)
