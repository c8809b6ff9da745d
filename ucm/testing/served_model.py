# SPDX-License-Identifier: MIT
"""A served model, its storage, and what tests do with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.testing.restartable_server import RestartableServer
from ucm.validation.backups import BackupMonitor
from ucm.validation.client import Reply, SGLangClient
from ucm.validation.prompts import PromptSource
from ucm.validation.storage import StorageDirectory, pool_name
from ucm.validation.validate import read_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path
    from types import TracebackType

    from ucm.testing.deployment import Deployment
    from ucm.validation.results import Answer

OUTPUT_TOKENS = 8
_QUIET_S = 0.5
_DEADLINE_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt that was computed and stored.

    `blocks` are the files it added, by pool, in no order.
    """

    prompt: tuple[int, ...]
    answer: Answer
    blocks: dict[str, list[Path]]


class ServedModel:
    """A deployment that runs; `with` starts and stops its server.

    Args:
        deployment: What to serve.
        directory: Gets the server's logs.
        seed: Of the prompts.
    """

    def __init__(self, deployment: Deployment, directory: Path, *, seed: int) -> None:
        self.deployment = deployment
        self.server = RestartableServer(deployment, directory)
        self.client = SGLangClient(self.server.url)
        self.storage = StorageDirectory(deployment.storage_roots)
        self.prompts = PromptSource(seed, vocabulary=500)

    def __enter__(self) -> ServedModel:
        self.server.__enter__()
        self.profile = read_profile(self.client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.server.__exit__(kind, error, trace)

    def generate(self, prompt: Sequence[int]) -> Reply:
        """Answer a prompt, with whatever the caches hold of it."""
        return self.client.generate(prompt, output_tokens=OUTPUT_TOKENS)

    def watch_backups(self) -> BackupMonitor:
        """Start to count what arrives on storage; pages missing after a minute fail the test."""
        return BackupMonitor(self.storage.pages, quiet_s=_QUIET_S, deadline_s=_DEADLINE_S, say=_fail)

    def store(self, prompt: tuple[int, ...]) -> StoredPrompt:
        """Compute a prompt nobody has sent before, wait until it is stored, and drop it from L1 and L2."""
        before = {block for files in self.storage.blocks().values() for block in files}
        backups = self.watch_backups()
        reply = self.generate(prompt)
        if reply.cached.total:
            raise AssertionError(f"{reply.cached} of a new prompt came from a cache")
        backups.expect(self.profile.stored_tokens(len(prompt)) // self.profile.page_tokens)
        backups.settle()
        self.client.flush_cache()
        added = {
            pool_name(namespace): sorted(set(files) - before)
            for namespace, files in self.storage.blocks().items()
        }
        return StoredPrompt(prompt, reply.answer, added)


def _fail(line: str) -> None:
    raise AssertionError(line)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until something is true; fail after a minute."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {_DEADLINE_S:.0f} s still not: {what}")
        time.sleep(_POLL_S)


def wait_for_blocks(blocks: Collection[Path]) -> None:
    """Wait until all of these files exist."""
    wait_until(lambda: all(block.exists() for block in blocks), f"{len(blocks)} blocks are stored")
