# SPDX-License-Identifier: MIT
"""What a server's arguments say about restorable prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ucm.validation.profile import ServerProfile

SERVER: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "unifiedcache",
    "page_size": 64,
    "max_total_num_tokens": 8192,
    "max_req_input_len": 4096,
    "chunked_prefill_size": -1,
}
MODEL = {"model_path": "org/model", "model_type": "llama"}


def profile(model_type: str = "llama", **server: object) -> ServerProfile:
    return ServerProfile.from_server(SERVER | server, MODEL | {"model_type": model_type})


@pytest.mark.parametrize(
    ("shared", "prompt", "expected"),
    [(300, 300, 256), (256, 256, 192), (257, 257, 256), (300, 900, 256), (63, 900, 0), (320, 321, 320)],
)
def test_a_plain_model_resumes_at_any_page_but_computes_one_token(
    shared: int, prompt: int, expected: int
) -> None:
    assert profile().restorable_tokens(shared, prompt) == expected


@pytest.mark.parametrize(
    ("shared", "prompt", "expected"),
    [(300, 300, 256), (256, 256, 0), (257, 257, 256), (320, 321, 320), (256, 300, 256)],
)
def test_a_recurrent_model_resumes_only_where_a_prompt_ended(shared: int, prompt: int, expected: int) -> None:
    assert profile(uses_mamba_radix_cache=True).restorable_tokens(shared, prompt) == expected


@pytest.mark.parametrize(
    ("length", "expected"), [(256, 192), (257, 192), (258, 256), (300, 256), (1, 0), (0, 0)]
)
def test_eagle_keys_pairs_of_tokens_so_that_prompts_are_one_key_shorter(length: int, expected: int) -> None:
    assert profile(speculative_algorithm="EAGLE").restorable_tokens(length, length) == expected


def test_a_longer_prompt_finds_only_the_pairs_of_the_stored_one() -> None:
    drafting = profile(speculative_algorithm="EAGLE")
    assert [drafting.restorable_tokens(shared, 900) for shared in (256, 257)] == [192, 256]


def test_a_recurrent_model_resumes_at_ends_of_prefill_chunks_too() -> None:
    chunked = profile(uses_mamba_radix_cache=True, chunked_prefill_size=128)
    assert chunked.restorable_tokens(384, 384) == 256


@pytest.mark.parametrize(("page_tokens", "step_tokens"), [(1, 64), (64, 64), (256, 256)])
def test_recurrent_state_is_kept_at_multiples_of_64_and_of_the_page(
    page_tokens: int, step_tokens: int
) -> None:
    assert profile(uses_mamba_radix_cache=True, page_size=page_tokens).step_tokens == step_tokens


@pytest.mark.parametrize(
    ("length", "expected"), [(511, 256), (512, 256), (513, 512), (768, 512), (1500, 1280)]
)
def test_deepseek_v4_resumes_a_page_before_the_end_of_a_prompt_too(length: int, expected: int) -> None:
    assert profile("deepseek_v4", page_size=256).storage_tokens(length, length) == expected


def test_storage_is_not_asked_for_less_than_the_threshold() -> None:
    assert profile().storage_tokens(200, 900) == 0


def test_the_threshold_of_the_extra_config_counts() -> None:
    extra = json.dumps({"prefetch_threshold": 64})
    assert profile(hicache_storage_backend_extra_config=extra).storage_tokens(200, 900) == 192


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 256, 1024])
@pytest.mark.parametrize("recurrent", [True, False])
def test_the_default_prompt_can_be_restored_from_storage(page_tokens: int, *, recurrent: bool) -> None:
    server = profile(page_size=page_tokens, uses_mamba_radix_cache=recurrent)
    length = server.default_prompt_tokens()
    assert server.storage_tokens(length, length) >= 256


@pytest.mark.parametrize(
    "extra",
    [
        {"storage_backends": "/a:/b"},
        {"storage_backends": ["/a", "/b"]},
        {"ucm_connector_config": {"storage_backends": "/a:/b"}},
        {"ucm_connectors": [{"ucm_connector_config": {"storage_backends": ["/a", "/b"]}}]},
    ],
)
def test_storage_roots_are_found_in_every_form_of_the_configuration(extra: dict[str, object]) -> None:
    roots = profile(hicache_storage_backend_extra_config=json.dumps(extra)).storage_roots
    assert roots == (Path("/a"), Path("/b"))


@pytest.mark.parametrize("extra", [None, "@/etc/config.toml", "not json", "[]"])
def test_an_unreadable_extra_config_gives_no_storage_roots(extra: str | None) -> None:
    assert profile(hicache_storage_backend_extra_config=extra).storage_roots == ()


def test_the_vocabulary_comes_from_a_model_directory_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))
    server = ServerProfile.from_server(SERVER, {**MODEL, "model_path": str(tmp_path)})
    assert server.vocabulary == 512


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("enable_hierarchical_cache", False, "--enable-hierarchical-cache"),
        ("hicache_storage_backend", None, "--hicache-storage-backend"),
        ("page_size", None, "page_size=None"),
    ],
)
def test_a_server_that_cannot_be_validated_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerProfile.from_server(SERVER | {field: value}, MODEL)
