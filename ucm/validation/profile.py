# SPDX-License-Identifier: MIT
"""What a server's arguments say about which prefixes it can restore."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The chunk of SGLang's linear-attention kernels: recurrent state is kept at multiples of it.
STATE_CHUNK_TOKENS = 64
# SGLang asks the storage for no shorter prefix, unless its extra config says otherwise.
PREFETCH_THRESHOLD_TOKENS = 256
# Random prompts use no token above this, because special tokens sit at the end of large vocabularies.
MAX_TOKEN_ID = 10_000
# `SpeculativeAlgorithm.is_eagle()`; SGLang calls the draft layers of a model (NEXTN, MTP) EAGLE.
PAIR_KEYED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProfile:
    """The rules of one server that decide how many tokens of a prompt can be reused.

    Args:
        model: The name it is served under.
        step_tokens: Reusable prefixes end at multiples of this.
        ends_where_stored: State exists only at the end of what was inserted, so that a prompt cannot be
            resumed from one step earlier. Sliding windows, those of DeepSeek V4 too, keep a page more.
        key_tokens: How many tokens the key of a position spans: EAGLE drafts from pairs, and caches by them.
        chunk_tokens: Longer prompts are computed, and inserted, in chunks of this size; 0: never.
        device_tokens: Capacity of L1.
        backend: `--hicache-storage-backend`.
        threshold_tokens: Shorter prefixes are never looked up on storage.
        storage_roots: Directories of the backend, as the server names them.
    """

    model: str
    vocabulary: int
    page_tokens: int
    step_tokens: int
    ends_where_stored: bool
    key_tokens: int
    chunk_tokens: int
    device_tokens: int
    max_prompt_tokens: int
    backend: str
    threshold_tokens: int
    write_policy: str
    prefetch_policy: str
    storage_roots: tuple[Path, ...]

    @classmethod
    def from_server(cls, server: Mapping[str, object], model: Mapping[str, object]) -> ServerProfile:
        """Read `/server_info` and `/model_info`.

        Raises:
            ValueError: The server has no HiCache storage, or does not say what is needed.
        """
        if not server.get("enable_hierarchical_cache"):
            raise ValueError(
                "the server runs without --enable-hierarchical-cache: there is no cache to validate"
            )
        backend = server.get("hicache_storage_backend")
        if not backend:
            raise ValueError(
                "the server runs without --hicache-storage-backend: there is no storage to validate"
            )
        page_tokens = _integer(server, "page_size")
        recurrent = bool(server.get("uses_mamba_radix_cache"))
        model_path = str(model.get("model_path") or server.get("model_path"))
        extra = _extra_config(server.get("hicache_storage_backend_extra_config"))
        threshold = extra.get("prefetch_threshold", PREFETCH_THRESHOLD_TOKENS)
        chunk = server.get("chunked_prefill_size")
        return cls(
            model=str(model.get("served_model_name") or model_path),
            vocabulary=min(_vocabulary(Path(model_path)) or MAX_TOKEN_ID, MAX_TOKEN_ID),
            page_tokens=page_tokens,
            step_tokens=max(page_tokens, STATE_CHUNK_TOKENS) if recurrent else page_tokens,
            ends_where_stored=recurrent,
            key_tokens=2 if server.get("speculative_algorithm") in PAIR_KEYED_ALGORITHMS else 1,
            chunk_tokens=max(chunk, 0) if isinstance(chunk, int) else 0,
            device_tokens=_integer(server, "max_total_num_tokens"),
            max_prompt_tokens=_integer(server, "max_req_input_len"),
            backend=str(backend),
            threshold_tokens=max(threshold if isinstance(threshold, int) else 0, page_tokens),
            write_policy=str(server.get("hicache_write_policy", "")),
            prefetch_policy=str(server.get("hicache_storage_prefetch_policy", "")),
            storage_roots=_storage_roots(extra),
        )

    def stored_tokens(self, prompt_tokens: int) -> int:
        """Return the end of the longest reusable prefix that a prompt of this length leaves behind."""
        keyed_tokens = max(prompt_tokens - self.key_tokens + 1, 0)
        return keyed_tokens // self.step_tokens * self.step_tokens

    def restorable_tokens(self, shared_tokens: int, prompt_tokens: int) -> int:
        """Return how much of a prompt is reused if its first `shared_tokens` were an earlier prompt.

        SGLang computes at least one token of every prompt, so a prompt is never reused to its end.
        """
        end, limit = self.stored_tokens(shared_tokens), prompt_tokens - self.key_tokens
        if end <= limit:
            return end
        if not self.ends_where_stored:
            return self.stored_tokens(prompt_tokens - 1)
        if not self.chunk_tokens or self.chunk_tokens % self.step_tokens:
            return 0
        return limit // self.chunk_tokens * self.chunk_tokens

    def storage_tokens(self, shared_tokens: int, prompt_tokens: int) -> int:
        """Return how much of a prompt is restored from storage when L1 and L2 hold nothing of it."""
        tokens = self.restorable_tokens(shared_tokens, prompt_tokens)
        return tokens if tokens >= self.threshold_tokens else 0

    def default_prompt_tokens(self) -> int:
        """Return a short prompt length that storage can restore, ending inside a page."""
        whole_steps = max(-(-self.threshold_tokens // self.step_tokens), 2)
        return whole_steps * self.step_tokens + max(self.step_tokens * 2 // 3, 1)


def _integer(server: Mapping[str, object], field: str) -> int:
    value = server.get(field)
    if not isinstance(value, int):
        raise ValueError(f"/server_info says {field}={value!r}; expected a number. Is this an SGLang server?")
    return value


def _extra_config(text: object) -> dict[str, object]:
    """Return the backend's extra config; empty if it lies in a file on the server's side (`@path`)."""
    if not isinstance(text, str) or text.startswith("@"):
        return {}
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _storage_roots(extra: Mapping[str, object]) -> tuple[Path, ...]:
    """Find `storage_backends`, flat or nested, as a list or joined by `:`."""
    value = extra.get("storage_backends")
    if isinstance(value, str):
        return tuple(Path(root) for root in value.split(":"))
    if isinstance(value, list):
        return tuple(Path(str(root)) for root in value)
    for nested in extra.values():
        for entry in nested if isinstance(nested, list) else [nested]:
            if isinstance(entry, dict) and (roots := _storage_roots(entry)):
                return roots
    return ()


def _vocabulary(model_path: Path) -> int | None:
    """Read the vocabulary size from a model directory on this machine, None if there is none."""
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None
