# SPDX-License-Identifier: MIT
"""A fake SGLang server: the HTTP edge of one, with three tiers that hold prefixes of whole pages."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_TOKENS = 64
DEVICE_TOKENS = 2048


class FakeSGLang:
    """Answers like SGLang: the answer depends on the prompt only, cached tokens on what was sent before.

    Set `storage_loses` or `storage_damages` to fail, `info` to claim other arguments.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": None,
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
            "page_size": PAGE_TOKENS,
            "uses_mamba_radix_cache": True,
            "chunked_prefill_size": -1,
            "max_total_num_tokens": DEVICE_TOKENS,
            "max_req_input_len": 1024,
        }
        self.model: dict[str, Any] = {"model_path": "fake/model", "model_type": "fake"}
        self.storage_loses = False
        self.storage_damages = False
        self.metrics = True
        self.url = ""
        self._lock = threading.Lock()
        self._device: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._host: set[tuple[int, ...]] = set()
        self._storage: set[tuple[int, ...]] = set()

    def restart(self) -> None:
        """Forget L1 and L2."""
        with self._lock:
            self._device.clear()
            self._host.clear()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the last event of the stream."""
        prompt = tuple(body["input_ids"])
        with self._lock:
            tier, reused = self._reuse(prompt) if body["logprob_start_len"] < 0 else ("", 0)
            self._insert(prompt)
        shift = 0.1 if self.storage_damages and tier == "storage" else 0.0
        pairs = [
            [-byte / 64 - shift, byte, None]
            for byte in hashlib.md5(repr(prompt).encode(), usedforsecurity=False).digest()
        ]
        details = {"device": 0, "host": 0, "storage": 0, tier: reused} if reused else None
        count = body["sampling_params"]["max_new_tokens"]
        return {"meta_info": {"output_token_logprobs": pairs[:count], "cached_tokens_details": details}}

    def metrics_text(self) -> str:
        """Return the counter of backed-up tokens."""
        tokens = sum(len(prefix) for prefix in self._storage)
        name = "sglang:backuped_tokens_total"
        return f'# TYPE {name} counter\n{name}{{tp_rank="0"}} {tokens}.0\n'

    def _reuse(self, prompt: tuple[int, ...]) -> tuple[str, int]:
        for length in range((len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS, 0, -PAGE_TOKENS):
            prefix = prompt[:length]
            for tier, held in (("device", self._device), ("host", self._host), ("storage", self._storage)):
                if prefix in held and not (tier == "storage" and self.storage_loses):
                    return tier, length
        return "", 0

    def _insert(self, prompt: tuple[int, ...]) -> None:
        prefix = prompt[: len(prompt) // PAGE_TOKENS * PAGE_TOKENS]
        self._device[prefix] = None
        self._device.move_to_end(prefix)
        self._host.add(prefix)
        self._storage.add(prefix)
        while sum(map(len, self._device)) > DEVICE_TOKENS:
            self._device.popitem(last=False)


@contextmanager
def running_fake() -> Iterator[FakeSGLang]:
    """Let a fake server listen on a free port of this machine."""
    fake = FakeSGLang()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/server_info":
                    self._send(json.dumps(fake.info))
                case "/model_info":
                    self._send(json.dumps(fake.model))
                case "/metrics" if fake.metrics:
                    self._send(fake.metrics_text())
                case _:
                    self._send("Not Found", status=404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            match self.path:
                case "/flush_cache":
                    fake.restart()
                    self._send("Cache flushed.\n")
                case "/generate":
                    event = fake.generate(json.loads(body))
                    self._send(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # The base class names it so.
            pass

        def _send(self, text: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
