# SPDX-License-Identifier: MIT
"""Real servers that differ in their storage backend only, each left idle after it has used its storage."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.backends import FILE, OURS
from benchmarks.pairs import expect
from benchmarks.processes import command_line, descendants
from benchmarks.results import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_STORAGE = "no storage"
BOOT_TIMEOUT_S = 300.0
END_TIMEOUT_S = 20.0
PROMPT_TOKENS = 300
RESTORED_TOKENS = 256
SERVER_FLAGS = shlex.split("""
    --host 127.0.0.1 --device cpu --attention-backend torch_native --sampling-backend pytorch
    --disable-cuda-graph --skip-tokenizer-init --sleep-on-idle --page-size 64 --max-total-tokens 4096
    --max-mamba-cache-size 64 --mamba-radix-cache-strategy extra_buffer
    --enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy write_through
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
    subprocess.run([sys.executable, "-m", "sglang_cpu.tiny_models", "qwen3_5", str(model)], check=True)
    with ExitStack() as stack:
        servers = []
        for name in names:
            progress(f"idle: starting a server, {name}")
            servers.append(stack.enter_context(_server(name, model, directory / name.replace(" ", "-"))))
        yield servers


@contextmanager
def _server(name: str, model: Path, storage: Path) -> Iterator[IdleServer]:
    storage.mkdir()
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    with (storage.parent / f"{storage.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *SERVER_FLAGS, *_storage_flags(name, storage)],
            env=os.environ | _environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, Path(log.name))
        _use_storage(url, is_stored=name != NO_STORAGE)
        yield IdleServer(name, _scheduler_of(process.pid))
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the server remove its shared memory; end what is left of it by force."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _storage_flags(name: str, storage: Path) -> list[str]:
    if name == NO_STORAGE:
        return []
    if name == FILE:
        extra_config: dict[str, object] = {"file_storage_path": str(storage)}
        backend = "file"
    else:
        expect(name, OURS, "server")
        extra_config = {
            "backend_name": "unifiedcache",
            "module_path": "ucm.integration.sglang.unifiedcache_store",
            "class_name": "UnifiedCacheStore",
            "interface_v1": 1,
            "storage_backends": str(storage),
        }
        backend = "dynamic"
    return [
        "--hicache-storage-backend",
        backend,
        "--hicache-storage-backend-extra-config",
        json.dumps(extra_config),
    ]


def _environment() -> dict[str, str]:
    return {"SGLANG_PLATFORM": "cpu_reference", "SGLANG_USE_CPU_ENGINE": "0", "CUDA_VISIBLE_DEVICES": ""}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _is_healthy(url):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 (our own server)
            return True
    except OSError:
        return False


def _use_storage(url: str, *, is_stored: bool) -> None:
    """Have a prompt backed up, dropped from the two upper tiers and restored, if there is a storage."""
    prompt = [3 + token % 500 for token in range(PROMPT_TOKENS)]
    deadline = time.monotonic() + 60
    _generate(url, prompt)
    while True:
        _post(f"{url}/flush_cache")
        cached = _generate(url, prompt)["meta_info"].get("cached_tokens_details") or {}
        if not is_stored or cached.get("storage") == RESTORED_TOKENS:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server restores {cached} of a prompt of {PROMPT_TOKENS} tokens")


def _generate(url: str, prompt: list[int]) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    return json.loads(_post(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling}))


def _post(url: str, content: dict[str, object] | None = None) -> bytes:
    body = json.dumps(content or {}).encode()
    request = urllib.request.Request(  # noqa: S310 (our own server)
        url, body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
        return bytes(reply.read())


def _scheduler_of(pid: int) -> int:
    schedulers = [child for child in descendants(pid) if "scheduler" in command_line(child)]
    expect(len(schedulers), 1, f"schedulers among {[command_line(child) for child in descendants(pid)]}")
    return schedulers[0]
