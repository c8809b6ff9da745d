# SPDX-License-Identifier: MIT
"""The few HTTP calls of an SGLang server that a validation needs."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from ucm.validation.results import Answer, CachedTokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType


class ServerError(Exception):
    """The server cannot be validated; the message says why and what to do."""


class ServerUnreachableError(ServerError):
    """Nothing answers at the URL, or it stopped answering."""


class ServerRefusedError(ServerError):
    """The server answered with an error."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated answer and where its prefix came from.

    `ttft_s` is the time to the first token in seconds, from sending the request.
    """

    answer: Answer
    cached: CachedTokens
    ttft_s: float


class SGLangClient:
    """Talk to one server. Methods block, and raise only `ServerError`; threads may share a client."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)
        except httpx.InvalidURL as error:
            raise ServerError(
                f"{url!r} is not a URL ({error}); expected something like http://127.0.0.1:30000"
            ) from error

    def __enter__(self) -> SGLangClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def server_info(self) -> dict[str, object]:
        """Return the server's resolved arguments and live state."""
        return self._get_json("/server_info", older="/get_server_info")

    def model_info(self) -> dict[str, object]:
        """Return what the server says about its model."""
        return self._get_json("/model_info", older="/get_model_info")

    def metrics(self) -> str | None:
        """Return the Prometheus text, or None on a server without `--enable-metrics`."""
        response = self._request("GET", "/metrics")
        # The mounted application answers below /metrics/ and redirects to it.
        if response.is_redirect:
            response = self._request("GET", "/metrics/")
        return response.text if response.is_success else None

    def flush_cache(self, wait_s: float = 60.0) -> None:
        """Drop L1 and L2, once every running request has ended.

        SGLang also drops backups that have not reached the storage yet.
        """
        deadline = time.monotonic() + wait_s
        while True:
            response = self._request("POST", "/flush_cache")
            if response.is_success:
                return
            if time.monotonic() > deadline:
                raise ServerRefusedError(f"POST {self.url}/flush_cache: {_error_text(response)}")
            time.sleep(0.2)

    def generate(self, prompt: Sequence[int], *, output_tokens: int, use_cache: bool = True) -> Reply:
        """Answer a prompt greedily.

        Without `use_cache` every token of the prompt is computed, whatever the caches hold: SGLang never
        reuses a position whose logprob is asked for.
        """
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": -1 if use_cache else 0,
            "stream": True,
        }
        last: dict[str, object] = {}
        first_token_s: float | None = None
        start = time.monotonic()
        try:
            with self._http.stream("POST", "/generate", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise ServerRefusedError(f"POST {self.url}/generate: {_error_text(response)}")
                for line in response.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    if first_token_s is None:
                        first_token_s = time.monotonic() - start
                    last = json.loads(line.removeprefix("data:"))
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise ServerUnreachableError(f"POST {self.url}/generate: {_reason(error)}") from error
        return self._reply(last, first_token_s or 0.0)

    def generate_at_once(self, prompts: Sequence[Sequence[int]], *, output_tokens: int) -> list[Reply]:
        """Answer several prompts concurrently; replies in the order of the prompts."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, output_tokens=output_tokens), prompts))

    def _reply(self, event: Mapping[str, object], ttft_s: float) -> Reply:
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise ServerRefusedError(f"POST {self.url}/generate: {event.get('error', event)}")
        pairs = meta.get("output_token_logprobs")
        if not isinstance(pairs, list):
            raise ServerRefusedError(
                f"POST {self.url}/generate: the reply has no output_token_logprobs; is this an SGLang server?"
            )
        answer = Answer(
            tokens=tuple(int(pair[1]) for pair in pairs), logprobs=tuple(float(pair[0]) for pair in pairs)
        )
        # Null when nothing was cached (SGLang 0.5.10 to 0.5.23).
        details = meta.get("cached_tokens_details") or {}
        cached = CachedTokens(
            device=int(details.get("device") or 0),
            host=int(details.get("host") or 0),
            storage=int(details.get("storage") or 0),
        )
        return Reply(answer=answer, cached=cached, ttft_s=ttft_s)

    def _get_json(self, path: str, older: str) -> dict[str, object]:
        """Read `path`, or `older`: the name of the same endpoint before it was renamed."""
        response = self._request("GET", path)
        if response.status_code == httpx.codes.NOT_FOUND:
            response = self._request("GET", older)
        if not response.is_success:
            raise ServerRefusedError(f"GET {self.url}{path}: {_error_text(response)}")
        try:
            document = response.json()
        except json.JSONDecodeError as error:
            raise ServerRefusedError(
                f"GET {self.url}{path}: not JSON ({error}); is this an SGLang server?"
            ) from error
        if not isinstance(document, dict):
            raise ServerRefusedError(
                f"GET {self.url}{path}: expected an object, got {type(document).__name__}"
            )
        return document

    def _request(self, method: str, path: str) -> httpx.Response:
        try:
            return self._http.request(method, path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachableError(f"{method} {self.url}{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _error_text(response: httpx.Response) -> str:
    return f"HTTP {response.status_code} {response.text.strip()[:500]}"
