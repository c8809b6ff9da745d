# SPDX-License-Identifier: MIT
"""Real servers that differ in their storage backend only, each left idle after it has used its storage."""

from __future__ import annotations

import json
import shlex
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_cpu.launch import Server, running_server
from sglang_cpu.tiny_models import WRITERS

from benchmarks.backends import backend_settings
from benchmarks.pairs import expect
from benchmarks.processes import command_line
from benchmarks.results import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

NO_STORAGE = "no storage"
RESTORE_TIMEOUT_S = 60.0
PROMPT_TOKENS = 300
RESTORED_TOKENS = 256
SERVER_FLAGS = shlex.split("""
    --sleep-on-idle --enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy write_through
    --hicache-storage-prefetch-policy wait_complete
    --hicache-mem-layout page_first --hicache-io-backend kernel
""")


@dataclass(frozen=True, slots=True)
class IdleServer:
    """A server with nothing to do."""

    name: str
    scheduler_pid: int


@contextmanager
def idle_servers(directory: Path, names: Sequence[str]) -> Iterator[list[IdleServer]]:
    """Start one server per name, one after the other, and end them all at the end.

    Each has stored and restored one prompt, so that whatever starts on first use is there.
    """
    model = directory / "model"
    model.mkdir()
    WRITERS["qwen3_5"](model, 0)
    with ExitStack() as stack:
        servers: list[IdleServer] = []
        for name in names:
            progress(f"idle: starting a server, {name}")
            flags = [*SERVER_FLAGS, *_storage_flags(name, directory)]
            log = directory / f"server-{len(servers)}.log"
            server = stack.enter_context(running_server(model, *flags, log=log))
            _use_storage(server, is_stored=name != NO_STORAGE)
            servers.append(IdleServer(name, _scheduler_of(server)))
        yield servers


def _storage_flags(name: str, directory: Path) -> list[str]:
    if name == NO_STORAGE:
        return []
    registered, extra_config = backend_settings(name, directory / name)
    return [
        *("--hicache-storage-backend", registered),
        *("--hicache-storage-backend-extra-config", json.dumps(extra_config)),
    ]


def _use_storage(server: Server, *, is_stored: bool) -> None:
    """Have a prompt backed up, dropped from the two upper tiers and restored, if there is a storage."""
    prompt = [3 + token % 500 for token in range(PROMPT_TOKENS)]
    deadline = time.monotonic() + RESTORE_TIMEOUT_S
    _generate(server, prompt)
    while True:
        _post(f"{server.url}/flush_cache", {})
        cached = _generate(server, prompt)["meta_info"].get("cached_tokens_details") or {}
        if not is_stored or cached.get("storage") == RESTORED_TOKENS:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server restores {cached} of a prompt of {PROMPT_TOKENS} tokens")


def _generate(server: Server, prompt: list[int]) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    return json.loads(_post(f"{server.url}/generate", {"input_ids": prompt, "sampling_params": sampling}))


def _post(url: str, content: dict[str, object]) -> bytes:
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 (our own server)
    with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
        return bytes(reply.read())


def _scheduler_of(server: Server) -> int:
    titles = {pid: command_line(pid) for pid in server.alive()}
    schedulers = [pid for pid, title in titles.items() if "scheduler" in title]
    expect(len(schedulers), 1, f"schedulers among {sorted(titles.values())}")
    return schedulers[0]
