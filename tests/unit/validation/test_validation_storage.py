# SPDX-License-Identifier: MIT
"""What a storage directory shows, and waiting for it to fill."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ucm.store.posix.block_file import FOOTER_BYTES, MAGIC
from ucm.validation.backups import BackupMonitor
from ucm.validation.storage import StorageDirectory

if TYPE_CHECKING:
    from pathlib import Path


def write_block(namespace: Path, name: str, payload_bytes: int) -> Path:
    shard = namespace / name[:3]
    shard.mkdir(parents=True, exist_ok=True)
    block = shard / name.ljust(32, "0")
    block.write_bytes(bytes(payload_bytes) + MAGIC + bytes(FOOTER_BYTES - len(MAGIC)))
    return block


def test_pools_are_counted_over_all_roots(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for number, root in enumerate(roots):
        write_block(root, f"aa{number}", 1024)
        write_block(root / "sglang_v2" / "deepseek_v4_c4_786240x1", f"bb{number}", 786240)
    write_block(roots[0] / "sglang_v2" / "kv_512x2", "ccc", 1024)
    usage = [
        (pool.name, pool.namespace, pool.page_bytes, pool.pages, pool.bytes)
        for pool in StorageDirectory(roots).pools()
    ]
    assert usage == [
        ("kv", "", 1024, 2, 2048),
        ("deepseek_v4_c4", "sglang_v2/deepseek_v4_c4_786240x1", 786240, 2, 2 * 786240),
        ("kv", "sglang_v2/kv_512x2", 1024, 1, 1024),
    ]


def test_what_the_native_store_has_written_counts_with_its_whole_size(tmp_path: Path) -> None:
    write_block(tmp_path, "aaa", 1024)
    write_block(tmp_path, "bbb", 1024).write_bytes(bytes(1024))
    [primary] = StorageDirectory([tmp_path]).pools()
    assert (primary.page_bytes, primary.pages) == (1024, 2)


def test_files_that_are_no_blocks_are_not_counted(tmp_path: Path) -> None:
    block = write_block(tmp_path / "sglang_v2" / "mamba_64x1", "abc", 64)
    block.with_name(block.name + ".tmp").write_bytes(b"")
    (tmp_path / "sglang_v2" / "mamba_64x1" / "identity.json").write_text("{}")
    (tmp_path / "README").write_text("")
    assert StorageDirectory([tmp_path]).pages() == {"sglang_v2/mamba_64x1": 1}


def test_the_wait_ends_when_every_expected_page_has_arrived(tmp_path: Path) -> None:
    directory = StorageDirectory([tmp_path])
    lines: list[str] = []
    monitor = BackupMonitor(directory.pages, quiet_s=0.05, deadline_s=30, say=lines.append)
    monitor.expect(2)
    write_block(tmp_path, "aaa", 64)
    late = threading.Timer(0.3, write_block, (tmp_path, "bbb", 64))
    late.start()
    monitor.settle()
    assert directory.pages() == {"": 2}
    assert lines == []
    late.join()


def test_pages_from_before_do_not_count(tmp_path: Path) -> None:
    write_block(tmp_path, "aaa", 64)
    lines: list[str] = []
    monitor = BackupMonitor(StorageDirectory([tmp_path]).pages, quiet_s=0, deadline_s=0.2, say=lines.append)
    monitor.expect(1)
    monitor.settle()
    assert lines == ["storage got 0 of 1 pages in 0 s"]


def test_what_was_waited_for_is_not_expected_again(tmp_path: Path) -> None:
    lines: list[str] = []
    monitor = BackupMonitor(StorageDirectory([tmp_path]).pages, quiet_s=0, deadline_s=0.2, say=lines.append)
    monitor.expect(1)
    write_block(tmp_path, "aaa", 64)
    monitor.settle()
    monitor.settle()
    assert lines == []
