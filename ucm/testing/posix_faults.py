# SPDX-License-Identifier: MIT
"""Faults of a POSIX file system that cannot be had for real, made at the system call."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from ucm.store.posix.engine import THREAD_NAME_PREFIX
from ucm.store.posix.layout import BlockLayout
from ucm.store.posix.prompt import PromptDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.store import BlockKey, StoreSpec


def block_path(storage: Path, spec: StoreSpec, key: BlockKey) -> Path:
    """Return the file of a block below a single storage root."""
    return Path(BlockLayout([str(storage)], spec.namespace).path(key))


@contextlib.contextmanager
def hanging_call(name: str, file: str) -> Iterator[threading.Event]:
    """Let `os.<name>` hang on files with `file` in their path, until the context ends; then it goes on.

    A read that must not wait gets EAGAIN, as from a kernel that does not have the data. Skips the test if it
    stores in memory, where nothing hangs.

    Yields:
        Set once a call hangs.
    """
    hanging, go_on = threading.Event(), threading.Event()

    def wait(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- any system call.
        if name == "preadv" and any(args[3:]):
            raise BlockingIOError
        hanging.set()
        if not threading.current_thread().name.startswith(THREAD_NAME_PREFIX):
            pytest.skip("the file system is in memory, where nothing waits for storage")
        go_on.wait()
        return call(*args, **kwargs)

    with faulty_call(name, file, wait):
        try:
            yield hanging
        finally:
            go_on.set()


@contextlib.contextmanager
def faulty_call(name: str, file: str, fault: Callable[..., Any]) -> Iterator[None]:
    """Call `fault(original, *args)` in place of `os.<name>` on files with `file` in their path.

    The kernel has nothing of these files in its caches, so that nobody gets past the fault.
    """
    original, open_promptly = getattr(os, name), PromptDirectory.open_cached

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- any system call.
        if file in _path_of(args[0]):
            return fault(original, *args, **kwargs)
        return original(*args, **kwargs)

    def refuse(directory: PromptDirectory, path: str, how: int) -> int:
        return -1 if file in f"{directory.path}/{path}" else open_promptly(directory, path, how)

    with mock.patch.object(os, name, call), mock.patch.object(PromptDirectory, "open_cached", refuse):
        yield


def _path_of(target: object) -> str:
    if isinstance(target, int):
        return str(Path(f"/proc/self/fd/{target}").readlink())
    return str(target)
