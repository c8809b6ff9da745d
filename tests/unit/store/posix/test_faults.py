# SPDX-License-Identifier: MIT
"""A PosixStore on a file system that misbehaves: real faults where the kernel can make them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreSpec, StoreUnavailableError
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path, faulty_call, hanging_call
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    FAILED,
    HURRY_S,
    MISSING,
    SPEC,
    assert_loads,
    incoming,
    key_of,
    load,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LARGE = StoreSpec("large_x1", (3_000_000,), SPEC.identity)


def open_store(
    storage: Path, spec: StoreSpec = SPEC, load_timeout_s: float = 60.0, dump_timeout_s: float = 60.0
) -> PosixStore:
    config = PosixStoreConfig(
        (str(storage),), load_timeout_s=load_timeout_s, dump_timeout_s=dump_timeout_s, lookup_timeout_s=60.0
    )
    return PosixStore(spec, config)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    store = open_store(tmp_path)
    yield store
    store.close()


def unfinished(storage: Path) -> list[Path]:
    return list(storage.glob("**/.tmp/*"))


def path_of(storage: Path, number: int) -> Path:
    return block_path(storage, SPEC, key_of(number))


# What can be in the place of a block file.


def test_a_directory_in_place_of_a_block_is_no_hit_and_costs_only_itself(
    store: PosixStore, tmp_path: Path
) -> None:
    path_of(tmp_path, 1).mkdir(parents=True)
    assert store.lookup([key_of(1)]) == [False]
    assert store.dump(outgoing([1, 2])) == [FAILED, DONE]
    assert load(store, [1, 2])[0] == [FAILED, DONE]


def test_a_fifo_in_place_of_a_block_hangs_nobody_and_gives_way(store: PosixStore, tmp_path: Path) -> None:
    path_of(tmp_path, 1).parent.mkdir(parents=True)
    os.mkfifo(path_of(tmp_path, 1))
    assert store.lookup([key_of(1)]) == [False]
    assert load(store, [1])[0] == [FAILED]
    assert store.dump(outgoing([1])) == [DONE]
    assert_loads(store, [1])


def test_a_dangling_link_in_place_of_a_block_is_a_miss_and_gives_way(
    store: PosixStore, tmp_path: Path
) -> None:
    path_of(tmp_path, 1).parent.mkdir(parents=True)
    path_of(tmp_path, 1).symlink_to(tmp_path / "nowhere")
    assert store.lookup([key_of(1)]) == [False]
    assert load(store, [1])[0] == [MISSING]
    assert store.dump(outgoing([1])) == [DONE]
    assert_loads(store, [1])


def test_a_block_nobody_may_read_is_no_hit_and_gives_way(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing([1]))
    path_of(tmp_path, 1).chmod(0)
    assert store.lookup([key_of(1)]) == [False]
    assert store.dump(outgoing([1])) == [DONE]
    assert_loads(store, [1])


def test_a_file_in_place_of_a_shard_directory_costs_only_that_shard(
    store: PosixStore, tmp_path: Path
) -> None:
    shard = path_of(tmp_path, 1).parent
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_text("in the way")
    assert store.lookup([key_of(1)]) == [False]
    assert load(store, [1])[0] == [MISSING]
    assert store.dump(outgoing([1, 2])) == [FAILED, DONE]
    assert unfinished(tmp_path) == []


def test_a_block_replaced_while_its_damage_was_found_stays(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing([1, 2]))
    path, good = path_of(tmp_path, 1), path_of(tmp_path, 1).read_bytes()
    path.write_bytes(bytes(len(good)))

    def replaced_meanwhile(preadv: Callable[..., int], *args: object) -> int:
        count = preadv(*args)
        fresh = tmp_path / "fresh"
        fresh.write_bytes(good)
        fresh.rename(path)
        return count

    with faulty_call("preadv", key_of(1).hex(), replaced_meanwhile):
        assert load(store, [1])[0] == [CORRUPT]
    assert_loads(store, [1, 2])


# Directories that vanish, and files that were made.


@pytest.mark.parametrize("level", ["shard", "namespace", "root"])
def test_a_directory_deleted_while_running_is_made_again(
    store: PosixStore, tmp_path: Path, level: str
) -> None:
    store.dump(outgoing([1]))
    shard = path_of(tmp_path, 1).parent
    shutil.rmtree({"shard": shard, "namespace": shard.parent, "root": tmp_path}[level])
    assert store.lookup([key_of(1)]) == [False]
    assert load(store, [1])[0] == [MISSING]
    assert store.dump(outgoing([1, 2])) == [DONE, DONE]
    assert_loads(store, [1, 2])


def test_block_files_are_readable_by_everyone_and_writable_by_their_owner(
    store: PosixStore, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    store.dump(outgoing([1]))
    os.umask(before)
    assert stat.S_IMODE(path_of(tmp_path, 1).stat().st_mode) == 0o644


def test_several_roots_keep_a_block_each_in_one_place(tmp_path: Path) -> None:
    roots = tuple(str(tmp_path / name) for name in "abc")
    store = PosixStore(SPEC, PosixStoreConfig(roots))
    numbers = list(range(60))
    assert store.dump(outgoing(numbers)) == [DONE] * 60
    assert_loads(store, numbers)
    counts = [len([p for p in (tmp_path / name).glob("*/???/*") if p.is_file()]) for name in "abc"]
    assert sum(counts) == 60
    assert min(counts) > 5
    assert sorted(store.scan()) == sorted(key_of(n) for n in numbers)
    store.close()


def test_a_block_in_a_root_that_is_not_its_own_is_not_scanned(tmp_path: Path) -> None:
    alone = open_store(tmp_path / "a")
    alone.dump(outgoing(list(range(20))))
    both = PosixStore(SPEC, PosixStoreConfig((str(tmp_path / "a"), str(tmp_path / "b"))))
    scanned = list(both.scan())
    assert 0 < len(scanned) < 20
    assert both.lookup(scanned) == [True] * len(scanned)
    alone.close()
    both.close()


# Storage that refuses.


@pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
def test_a_dump_that_fails_anywhere_costs_only_its_block_and_leaves_nothing(
    store: PosixStore, tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    def full(original: Callable[..., object], *args: object, **kwargs: object) -> None:
        if call == "close":
            original(*args, **kwargs)  # The descriptor is gone even when close reports an error.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with faulty_call(call, key_of(1).hex(), full):
        assert store.dump(outgoing([0, 1, 2])) == [DONE, FAILED, DONE]
    assert unfinished(tmp_path) == []
    assert store.lookup([key_of(n) for n in range(3)]) == [True, False, True]
    [line] = caplog.messages
    assert line == (
        f"dump {SPEC.namespace}: 2 of 3 blocks, 0 missing, 0 corrupt, 1 failed; "
        f"first {path_of(tmp_path, 1)}: ENOSPC: No space left on device"
    )
    assert store.stats().dump_failed == 1
    assert store.dump(outgoing([1])) == [DONE]


def test_a_short_write_is_continued(store: PosixStore) -> None:
    def in_pieces(
        pwritev: Callable[..., int], descriptor: int, buffers: Sequence[memoryview], offset: int
    ) -> int:
        return pwritev(descriptor, [buffers[0][:700]], offset)

    with faulty_call("pwritev", key_of(1).hex(), in_pieces):
        assert store.dump(outgoing([1])) == [DONE]
    assert_loads(store, [1])


def input_output_error(*_args: object, **_kwargs: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_load_that_fails_anywhere_costs_only_its_block(store: PosixStore, call: str) -> None:
    store.dump(outgoing([0, 1, 2]))

    with faulty_call(call, key_of(1).hex(), input_output_error):
        assert load(store, [0, 1, 2])[0] == [DONE, FAILED, DONE]
    assert_loads(store, [0, 1, 2])
    assert store.stats().load_failed == 1


def test_a_lookup_that_fails_is_a_miss_with_a_warning(
    store: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.dump(outgoing([0, 1]))

    def denied(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with faulty_call("stat", key_of(1).hex(), denied):
        assert store.lookup([key_of(0), key_of(1)]) == [True, False]
    assert "EACCES: Permission denied" in caplog.messages[0]


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_scan_passes_over_what_it_cannot_read(store: PosixStore, call: str) -> None:
    store.dump(outgoing([0, 1, 2]))
    with faulty_call(call, key_of(1).hex(), input_output_error):
        assert sorted(store.scan()) == sorted([key_of(0), key_of(2)])


def test_a_scan_that_cannot_list_a_directory_names_it(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing([1]))
    shard = path_of(tmp_path, 1).parent
    with (
        faulty_call("listdir", str(shard), input_output_error),
        pytest.raises(StoreUnavailableError, match=f"cannot list {shard}: Input/output error"),
    ):
        list(store.scan())


def test_a_miss_is_not_warned_of(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        store.lookup([key_of(1)])
        load(store, [1])
    assert caplog.messages == []


def run_python(code: str, *args: object) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_file_size_limit_fails_the_dump_and_nothing_else(tmp_path: Path) -> None:
    said = run_python(
        """
        import resource, sys
        from pathlib import Path
        from ucm.testing.store_conformance import *
        from ucm.store.posix.store import PosixStore
        from ucm.store.posix.config import PosixStoreConfig
        large = StoreSpec("large_x1", (300_000,), SPEC.identity)
        stores = [PosixStore(spec, PosixStoreConfig((sys.argv[1],))) for spec in (SPEC, large)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        print(*[store.dump(outgoing([1, 2], store.spec))[0].name for store in stores])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(*[store.dump(outgoing([1, 2], store.spec))[0].name for store in stores])
        for store in stores:
            assert_loads(store, [1, 2])
            store.close()
        """,
        tmp_path,
    )
    assert said.split() == ["DONE", "FAILED", "DONE", "DONE"]
    assert unfinished(tmp_path) == []


def test_a_full_disk_fails_what_does_not_fit_and_dumps_go_on_when_there_is_space(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    probe = [str(unshare), "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", str(tmp_path)]
    if not unshare or subprocess.run(probe, capture_output=True, check=False).returncode:  # noqa: S603
        pytest.skip("needs a user namespace to mount a small tmpfs in")
    code = """
        import sys
        from ucm.testing.store_conformance import *
        from ucm.store.posix.store import PosixStore
        from ucm.store.posix.config import PosixStoreConfig
        spec = StoreSpec("x1", (300_000,), SPEC.identity)
        store = PosixStore(spec, PosixStoreConfig((sys.argv[1],)))
        print(store.dump(outgoing(range(5), spec)).count(DONE))
        fits = store.lookup([key_of(n) for n in range(5)])
        assert_loads(store, [n for n in range(5) if fits[n]])
        store.delete([key_of(n) for n in range(5)])
        print(store.dump(outgoing([5, 6, 7], spec)).count(DONE))
        store.close()
        """
    inner = f'mount -t tmpfs -o size=1M small {tmp_path} && exec {sys.executable} -c "$CODE" {tmp_path}/kv'
    done = subprocess.run(  # noqa: S603 -- our own code in a namespace of its own.
        [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", inner],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CODE": textwrap.dedent(code)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "3"]
    assert "ENOSPC" in done.stderr


def test_10000_blocks_need_no_more_than_a_few_descriptors(tmp_path: Path) -> None:
    said = run_python(
        """
        import os, resource, sys
        from ucm.testing.store_conformance import *
        from ucm.store.posix.store import PosixStore
        from ucm.store.posix.config import PosixStoreConfig
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        spec = StoreSpec("x1", (64,), SPEC.identity)
        store = PosixStore(spec, PosixStoreConfig((sys.argv[1],)))
        blocks = outgoing(range(100), spec)
        store.dump(blocks)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            assert set(store.dump(blocks)) == {DONE}
            assert set(store.load(blocks)) == {DONE}
            store.delete([key_of(n) for n in range(100)])
        print(len(os.listdir("/proc/self/fd")) - before)
        store.close()
        """,
        tmp_path,
    )
    assert said == "0"


# Opening.


def test_opening_removes_what_a_dead_writer_left(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    run_python(
        """
        import os, sys
        from pathlib import Path
        from ucm.store.posix.writer import new_writer_name
        Path(sys.argv[1], "0" * 32 + "." + new_writer_name()).write_bytes(b"half")
        """,
        tmp_path / SPEC.namespace / ".tmp",
    )
    assert len(unfinished(tmp_path)) == 1
    open_store(tmp_path).close()
    assert unfinished(tmp_path) == []


def test_a_read_only_root_is_refused_with_its_name(tmp_path: Path) -> None:
    said = run_python(
        """
        import sys
        from pathlib import Path
        from ucm.store import StoreUnavailableError
        from ucm.store.posix.config import PosixStoreConfig
        from ucm.store.posix.store import PosixStore
        from ucm.testing.privileges import obey_file_modes
        from ucm.testing.store_conformance import SPEC
        obey_file_modes()
        Path(sys.argv[1]).chmod(0o500)
        try:
            PosixStore(SPEC, PosixStoreConfig((sys.argv[1],)))
        except StoreUnavailableError as exc:
            print(exc)
        Path(sys.argv[1]).chmod(0o700)
        """,
        tmp_path,
    )
    assert said.startswith(f"cannot keep blocks in {tmp_path}/{SPEC.namespace}: Permission denied; name a")


def test_directories_that_may_not_be_used_fail_what_needs_them_until_they_may(tmp_path: Path) -> None:
    said = run_python(
        """
        import sys
        from pathlib import Path
        from ucm.store.posix.config import PosixStoreConfig
        from ucm.store.posix.store import PosixStore
        from ucm.testing.posix_faults import block_path
        from ucm.testing.privileges import obey_file_modes
        from ucm.testing.store_conformance import *
        obey_file_modes()
        root = Path(sys.argv[1])
        store = PosixStore(SPEC, PosixStoreConfig((str(root),)))
        store.dump(outgoing([1, 2]))
        locked = [block_path(root, SPEC, key_of(1)).parent, root / SPEC.namespace / ".tmp"]
        for mode in (0, 0o700):
            for directory in locked:
                directory.chmod(mode)
            print(*[status.name for status in load(store, [1, 2])[0]], store.dump(outgoing([3]))[0].name)
        print(*store.lookup([key_of(n) for n in (1, 2, 3)]))
        store.close()
        """,
        tmp_path,
    )
    # What is in the kernel's caches needs no permission; what is not is refused.
    assert said.splitlines() == ["FAILED DONE FAILED", "DONE DONE DONE", "True True True"]


def test_a_file_system_that_takes_no_files_is_refused_with_its_name() -> None:
    with pytest.raises(StoreUnavailableError, match=r"cannot keep blocks in /proc/self/kv"):
        open_store(Path("/proc/self/kv"))


def test_a_root_that_does_not_answer_is_refused_at_the_deadline(tmp_path: Path) -> None:
    with (
        hanging_call("pwrite", "probe"),
        pytest.raises(StoreUnavailableError, match=rf"cannot open {tmp_path}/.*no answer within {HURRY_S:g}"),
    ):
        open_store(tmp_path, dump_timeout_s=HURRY_S)


# Reading in place, staged, and hung.


def test_blocks_dropped_from_the_page_cache_load_byte_for_byte(tmp_path: Path) -> None:
    store = open_store(tmp_path, LARGE)
    numbers = list(range(5))
    store.dump(outgoing(numbers, LARGE))
    for number in numbers:
        descriptor = os.open(block_path(tmp_path, LARGE, key_of(number)), os.O_RDONLY)
        os.fsync(descriptor)  # Only what is on the disk can be dropped.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    assert_loads(store, numbers)
    store.close()


def no_page_cache(preadv: Callable[..., int], *args: object) -> int:
    if any(args[3:]):
        raise BlockingIOError
    return preadv(*args)


def half_in_the_page_cache(
    preadv: Callable[..., int], descriptor: int, buffers: Sequence[memoryview], *args: object
) -> int:
    if any(args[1:]):
        return preadv(descriptor, [buffers[0][: len(buffers[0]) // 2]], *args)
    return preadv(descriptor, buffers, *args)


def not_supported(preadv: Callable[..., int], *args: object) -> int:
    if any(args[3:]):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return preadv(*args)


def in_small_pieces(
    preadv: Callable[..., int], descriptor: int, buffers: Sequence[memoryview], offset: int, *flags: int
) -> int:
    if any(flags):
        raise BlockingIOError
    return preadv(descriptor, [buffers[0][:1001]], offset)


@pytest.mark.parametrize("reading", [no_page_cache, half_in_the_page_cache, not_supported, in_small_pieces])
@pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["three segments", "larger than the bounce buffer"])
def test_what_is_not_in_the_page_cache_loads_byte_for_byte(
    tmp_path: Path, reading: Callable[..., int], spec: StoreSpec
) -> None:
    store = open_store(tmp_path, spec)
    store.dump(outgoing([1], spec))
    with faulty_call("preadv", key_of(1).hex(), reading):
        assert_loads(store, [1])
    store.close()


@pytest.mark.parametrize("reading", [no_page_cache, half_in_the_page_cache])
@pytest.mark.parametrize("length", [0, 100, 4500, 4999, 5001, 5063, 5065, 20_000])
def test_a_wrong_length_is_seen_in_a_staged_read_too(
    store: PosixStore, tmp_path: Path, reading: Callable[..., int], length: int
) -> None:
    store.dump(outgoing([1]))
    whole = path_of(tmp_path, 1).read_bytes()
    path_of(tmp_path, 1).write_bytes((whole * 4)[:length])
    with faulty_call("preadv", key_of(1).hex(), reading):
        assert load(store, [1])[0] == [CORRUPT]


@pytest.mark.parametrize("call", ["open", "preadv", "close"])
def test_a_load_hanging_anywhere_ends_at_its_deadline_and_writes_nothing_afterwards(
    tmp_path: Path, call: str
) -> None:
    store = open_store(tmp_path, LARGE, load_timeout_s=HURRY_S)
    store.dump(outgoing([1, 2], LARGE))
    memory = incoming([1, 2], LARGE)
    with hanging_call(call, key_of(1).hex()):
        assert store.load([guarded.block for guarded in memory]) == [FAILED, DONE]
        at_return = memory[0].payload
        memory[0].block.segments[0][:] = payload_of(7, LARGE)  # The page has a new owner.
    store.close()  # Waits for the workers, which go on now.
    assert memory[0].payload == payload_of(7, LARGE)
    assert call == "close" or set(at_return) == {0xEE}


@pytest.mark.parametrize("call", ["access", "open", "pwritev", "close"])
def test_a_dump_hanging_anywhere_before_the_rename_is_not_published(tmp_path: Path, call: str) -> None:
    store = open_store(tmp_path, dump_timeout_s=HURRY_S)
    with hanging_call(call, key_of(1).hex()):
        assert store.dump(outgoing([1, 2])) == [FAILED, DONE]
    store.close()
    assert not path_of(tmp_path, 1).exists()
    assert unfinished(tmp_path) == []


def test_a_dump_hanging_while_it_looks_at_a_stored_block_leaves_it_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path, dump_timeout_s=HURRY_S)
    store.dump(outgoing([1]))
    before = path_of(tmp_path, 1).stat()
    with hanging_call("stat", key_of(1).hex()):
        assert store.dump(outgoing([1, 2])) == [FAILED, DONE]
    store.close()
    assert path_of(tmp_path, 1).stat() == before
    assert unfinished(tmp_path) == []


def test_a_dump_that_may_not_look_writes_the_block_anew(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing([1]))
    before = path_of(tmp_path, 1).stat().st_ino
    with faulty_call("access", key_of(1).hex(), lambda *_args: False):
        assert store.dump(outgoing([1])) == [DONE]
    assert path_of(tmp_path, 1).stat().st_ino != before
    assert_loads(store, [1])


def test_a_missed_deadline_is_one_warning_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, load_timeout_s=HURRY_S)
    store.dump(outgoing([0, 1, 2]))
    with hanging_call("open", key_of(1).hex()):
        load(store, [0, 1, 2, 3])
    store.close()
    assert caplog.messages == [
        f"load {SPEC.namespace}: 2 of 4 blocks, 1 missing, 0 corrupt, 1 failed; "
        f"first {path_of(tmp_path, 1)}: no answer within {HURRY_S:g} s"
    ]


def test_a_signal_does_not_disturb_a_load(store: PosixStore) -> None:
    store.dump(outgoing(list(range(50))))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert_loads(store, list(range(50)))
    finally:
        signal.signal(signal.SIGUSR1, before)
