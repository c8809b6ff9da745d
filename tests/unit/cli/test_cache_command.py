# SPDX-License-Identifier: MIT
"""`ucm-sglang cache` on real blocks: what it tells, what it finds, and what it removes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ucm.cli.main import main
from ucm.store import StoreSpec
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.aged_blocks import dump_aged
from ucm.testing.block_damage import flip_payload
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import SPEC, key_of, outgoing

if TYPE_CHECKING:
    from pathlib import Path

KV = StoreSpec("", (8192 - 64,), SPEC.identity)
SWA = StoreSpec("sglang_v2/swa_8128x1", (8192 - 64,), b"another identity")
DAY = 24 * 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten blocks of one pool, a day to ten days old, and one new one of another."""
    config = PosixStoreConfig((str(tmp_path),))
    kv, swa = PosixStore(KV, config), PosixStore(SWA, config)
    for number in range(10):
        dump_aged(kv, tmp_path, [number], minutes_ago=(number + 1) * DAY)
    swa.dump(outgoing([1], SWA))
    kv.close()
    swa.close()
    return tmp_path


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_stats_name_every_pool_and_the_total(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", str(root)]) == 0
    header, primary, swa, total = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["namespace", "blocks", "GB"]
    assert primary.split()[:4] == ["(primary", "KV)", "10", "0.000"]
    assert swa.split()[:2] == ["sglang_v2/swa_8128x1", "1"]
    assert total.split()[:2] == ["total", "11"]
    oldest, newest = primary.split()[4], primary.split()[6]
    assert oldest < newest


def test_verify_finds_nothing_in_a_whole_cache(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(root)]) == 0
    assert capsys.readouterr().out == "11 good, 0 no footer, 0 damaged, 0 unreadable\n"


def test_verify_names_what_is_damaged_and_why(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flipped, emptied, swapped, native = (block_path(root, KV, key_of(number)) for number in range(4))
    flip_payload(flipped)
    emptied.write_bytes(b"")
    swapped.write_bytes(block_path(root, KV, key_of(5)).read_bytes())
    native.write_bytes(bytes(8128))
    assert main(["cache", "verify", str(root)]) == 1
    *found, total = capsys.readouterr().out.splitlines()
    assert sorted(found) == sorted(
        [
            f"damaged: {flipped}: the payload does not match its checksum",
            f"damaged: {emptied}: no footer",
            f"damaged: {swapped}: it holds key {key_of(5).hex()}",
        ]
    )
    assert total == "7 good, 1 no footer, 3 damaged, 0 unreadable"


def test_clean_only_says_what_it_would_do(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    assert main(["cache", "clean", "--older-than", "1h", str(root)]) == 0
    assert files(root) == before
    assert capsys.readouterr().out.splitlines()[-1] == "would remove (--yes does it): 10 files, 0.000 GB"


def test_clean_removes_what_was_not_used_for_so_long(root: Path) -> None:
    before = files(root)
    assert main(["cache", "clean", "--older-than", "7.5d", "--yes", str(root)]) == 0
    assert before - files(root) == {block_path(root, KV, key_of(number)) for number in (7, 8, 9)}


def test_clean_removes_what_is_damaged_and_leaves_what_is_good_or_has_no_footer(root: Path) -> None:
    flipped, native = (block_path(root, KV, key_of(number)) for number in range(2))
    flip_payload(flipped)
    native.write_bytes(bytes(8128))
    before = files(root)
    assert main(["cache", "clean", "--damaged", "--yes", str(root)]) == 0
    assert before - files(root) == {flipped}


def test_clean_removes_unfinished_and_foreign_files(root: Path) -> None:
    shard = block_path(root, KV, key_of(1)).parent
    unfinished = root / SWA.namespace / ".tmp" / ("0" * 32 + ".elsewhere-1-2-3")
    foreign, fresh = shard / "old.bak", shard / "new.bak"
    for path in (unfinished, foreign, fresh):
        path.write_bytes(b"x")
    for path in (unfinished, foreign):
        os.utime(path, (1e9, 1e9))
    before = files(root)
    assert main(["cache", "clean", "--unfinished", "--foreign", "--yes", str(root)]) == 0
    assert before - files(root) == {unfinished, foreign}


def test_what_is_to_be_cleaned_must_be_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clean", "--yes", str(root)]) == 4
    assert "say what to remove" in capsys.readouterr().err


@pytest.mark.parametrize("age", ["30", "d", "0d", "-1d", "3w"])
def test_a_wrong_age_is_refused(root: Path, age: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["cache", "clean", f"--older-than={age}", str(root)])
    assert refusal.value.code == 2
    assert "like 30d" in capsys.readouterr().err


def test_what_is_no_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", str(tmp_path / "nowhere")]) == 4
    assert "is no directory" in capsys.readouterr().err
