# SPDX-License-Identifier: MIT
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ucm.integration.sglang.config import CONFIG_FILE_VARIABLE, UnifiedCacheConfig
from ucm.store.errors import StoreConfigError

if TYPE_CHECKING:
    from pathlib import Path


def parse(extra: dict[str, Any] | None, environ: dict[str, str] | None = None) -> UnifiedCacheConfig:
    return UnifiedCacheConfig.from_extra_config(extra, environ or {})


def nested(**options: object) -> dict[str, Any]:
    """Upstream's form, as its documentation has it."""
    return {
        "kv_connector_extra_config": {
            "ucm_connector_name": "UcmPipelineStore",
            "ucm_connector_module_path": "ucm.store.pipeline.connector",
            "ucm_connector_config": options,
        }
    }


def test_the_flat_form_needs_a_storage_directory_only() -> None:
    assert parse({"storage_backends": "/mnt/a"}).store.storage_roots == ("/mnt/a",)


def test_upstream_s_nested_form_means_the_same() -> None:
    flat, upstream = parse({"storage_backends": "/mnt/a"}), parse(nested(storage_backends="/mnt/a"))

    assert upstream.store.storage_roots == flat.store.storage_roots
    assert upstream.store.options == flat.store.options


# sglang #39550
@pytest.mark.parametrize("roots", ["/mnt/a:/mnt/b", ["/mnt/a", "/mnt/b"], ":/mnt/a:/mnt/b:"])
def test_a_list_and_a_joined_string_of_roots_are_the_same(roots: object) -> None:
    assert parse({"storage_backends": roots}).store.storage_roots == ("/mnt/a", "/mnt/b")
    assert parse(nested(storage_backends=roots)).store.storage_roots == ("/mnt/a", "/mnt/b")


@pytest.mark.parametrize("switch", [True, "true", 1, "1", "True"])
def test_what_sglang_leaves_for_dynamic_loading_is_no_setting_of_ours(switch: object) -> None:
    extra = {
        "backend_name": "unifiedcache",
        "module_path": "ucm.integration.sglang.unifiedcache_store",
        "class_name": "UnifiedCacheStore",
        "interface_v1": switch,
        "prefetch_threshold": 64,
        "storage_backends": "/mnt/a",
    }

    assert parse(extra) == parse({"storage_backends": "/mnt/a"})


def test_numbers_may_be_text() -> None:
    assert parse({"storage_backends": "/a", "io_threads": "4"}) == parse(
        {"storage_backends": "/a", "io_threads": 4}
    )


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_an_unknown_key_is_named_with_the_closest_valid_one(form: str) -> None:
    options = {"storage_backends": "/mnt/a", "io_thread": 8}

    with pytest.raises(StoreConfigError, match=r"'io_thread'.*'io_threads'"):
        parse(options if form == "flat" else nested(**options))


def test_a_key_beside_the_nested_form_is_named() -> None:
    extra = {**nested(storage_backends="/mnt/a"), "storage_backends": "/mnt/b"}

    with pytest.raises(StoreConfigError, match=r"'storage_backends'.*'kv_connector_extra_config'"):
        parse(extra)


@pytest.mark.parametrize("extra", [None, {}, {"prefetch_threshold": 256, "interface_v1": 1}])
def test_without_storage_the_error_shows_what_to_write(extra: dict[str, Any] | None) -> None:
    with pytest.raises(StoreConfigError, match=r'extra-config \'\{"storage_backends": "/mnt/kv-cache"\}\''):
        parse(extra)


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_the_yaml_file_takes_both_forms(form: str, tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    flat = "storage_backends: /mnt/a\nio_threads: 4\n"
    indented = "".join(f"    {line}\n" for line in flat.splitlines())
    file.write_text(
        flat if form == "flat" else f"kv_connector_extra_config:\n  ucm_connector_config:\n{indented}"
    )

    config = parse({"interface_v1": 1}, {CONFIG_FILE_VARIABLE: str(file)})

    assert config == parse({"storage_backends": "/mnt/a", "io_threads": 4})


def test_the_command_line_wins_over_the_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text("storage_backends: /mnt/from-file\n")

    config = parse({"storage_backends": "/mnt/a"}, {CONFIG_FILE_VARIABLE: str(file)})

    assert config.store.storage_roots == ("/mnt/a",)


@pytest.mark.parametrize("content", [None, "- a list\n", "storage_backends: [unclosed\n", b"\xff\xfe\x00"])
def test_a_bad_yaml_file_is_named(content: str | bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "ucm.yaml"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    with pytest.raises(StoreConfigError, match=r"ucm\.yaml"):
        parse(None, {CONFIG_FILE_VARIABLE: str(file)})


def test_parsing_changes_nothing_it_is_given() -> None:
    extra = {"storage_backends": ["/mnt/a"], "interface_v1": 1}

    parse(extra)

    assert extra == {"storage_backends": ["/mnt/a"], "interface_v1": 1}
