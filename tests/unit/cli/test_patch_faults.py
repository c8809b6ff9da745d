# SPDX-License-Identifier: MIT
"""Patching that is killed, fails, or runs several times at once."""

from __future__ import annotations

import errno
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ucm.patching.errors import InstallationError
from ucm.patching.installation import find_by_directory
from ucm.patching.patcher import STATE_DIRECTORY, Patcher, PatchState
from ucm.testing.sglang_copy import copy_patched_files, installed_patch_set

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IMPOSSIBLE = 4
CHANGING_EVENTS = frozenset({"os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.copyfile"})


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package directory of an unpatched SGLang of this test's own."""
    return copy_patched_files(tmp_path / "site-packages").package


@pytest.fixture
def patcher(package: Path, monkeypatch: pytest.MonkeyPatch) -> Patcher:
    """What patches that SGLang."""
    # A killed process loses nothing that it wrote; only a machine that crashes does.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return Patcher(installed_patch_set(), find_by_directory(package))


def run(action: str, patcher: Patcher) -> int:
    """Apply or revert; return what the command would return to the shell."""
    try:
        patcher.apply() if action == "apply" else patcher.revert()
    except InstallationError as error:
        print(error, file=sys.stderr)  # noqa: T201 # For the test that captures it.
        return IMPOSSIBLE
    return 0


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a child process; return its exit status, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_change(number: int, fault: Callable[[], None], directory: Path) -> Callable[[], int]:
    """Call `fault` instead of the `number`-th change that this process makes to files below `directory`.

    Returns:
        A function that tells how many changes there were.
    """
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (writes or event in CHANGING_EVENTS) and str(arguments[0]).startswith(str(directory)):
            seen += 1
            if seen == number:
                fault()

    sys.addaudithook(hook)
    return lambda: seen


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def interrupted(
    action: str, patcher: Patcher, directory: Path, number: int, fault: Callable[[], None]
) -> int:
    def work() -> int:
        at_change(number, fault, directory)
        return run(action, patcher)

    return in_child(work)


def changes_of(action: str, patcher: Patcher, directory: Path) -> int:
    """Count the changes that `action` makes, and make them."""

    def work() -> int:
        count = at_change(0, kill_self, directory)
        run(action, patcher)
        return count()

    return in_child(work)


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_kill_at_any_point_is_put_right(package: Path, patcher: Patcher, action: str) -> None:
    opposite = "revert" if action == "apply" else "apply"
    pristine = tree(package.parent)
    patcher.apply()
    patched = tree(package)
    run(opposite, patcher)
    states = set()
    for number in range(1, changes_of(action, patcher, package.parent) + 1):
        run(opposite, patcher)
        assert interrupted(action, patcher, package.parent, number, kill_self) == -signal.SIGKILL
        states.add(patcher.state())
        if number % 2:
            assert run("apply", patcher) == 0
            assert tree(package) == patched
        else:
            assert run("revert", patcher) == 0
            assert tree(package.parent) == pristine
    # The kills fell before, between and after the renames.
    assert states == {PatchState.NOT_APPLIED, PatchState.INCOMPLETE, PatchState.APPLIED}


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_an_error_at_any_point_leaves_all_files_changed_or_none(
    package: Path, patcher: Patcher, action: str
) -> None:
    opposite = "revert" if action == "apply" else "apply"
    pristine = tree(package)
    patcher.apply()
    patched = tree(package)
    run(opposite, patcher)
    before, after = (pristine, patched) if action == "apply" else (patched, pristine)
    failures = 0
    for number in range(1, changes_of(action, patcher, package.parent) + 1):
        run(opposite, patcher)
        status = interrupted(action, patcher, package.parent, number, fail)
        assert tree(package) in ((after,) if status == 0 else (before, after))
        failures += status == IMPOSSIBLE
    # Errors while tidying up may be passed over, but none of the renames'.
    assert failures > len(pristine)


def test_an_unwritable_environment_is_reported(
    package: Path, patcher: Patcher, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(package.parent)
    assert interrupted("apply", patcher, package.parent, 1, fail) == IMPOSSIBLE
    error = capfd.readouterr().err
    assert "Read-only file system" in error
    assert "without patching" in error
    assert tree(package.parent) == before


def test_several_processes_may_patch_and_revert_at_once(package: Path, patcher: Patcher) -> None:
    before = tree(package.parent)

    def work() -> int:
        return max(run(action, patcher) for action in ["apply", "revert"] * 20)

    with ThreadPoolExecutor(4) as processes:
        assert list(processes.map(lambda _: in_child(work), range(4))) == [0] * 4
    run("revert", patcher)
    assert tree(package.parent) == before
    assert not (package.parent / STATE_DIRECTORY).exists()


def test_the_state_directory_may_vanish_while_another_process_makes_sure_it_is_there(
    package: Path, patcher: Patcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir
    calls: list[Path] = []

    def already_there_and_gone(path: Path, mode: int = 0o777) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", already_there_and_gone)
    assert run("apply", patcher) == 0
    assert calls[0] == package.parent / STATE_DIRECTORY
