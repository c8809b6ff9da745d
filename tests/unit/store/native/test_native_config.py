# SPDX-License-Identifier: MIT
"""Choosing a store of UCM's own package, and what is said when that cannot work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreConfigError
from ucm.store.factory import StoreConfig, claim_identity, open_store
from ucm.store.native import package
from ucm.store.native.config import NativeStoreConfig
from ucm.testing.store_conformance import SPEC

if TYPE_CHECKING:
    from pathlib import Path


def native(**options: object) -> NativeStoreConfig:
    """Parse UCM's nested form with `engine: native`."""
    config = StoreConfig.from_mapping(
        {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": {"engine": "native", **options}}
    )
    assert isinstance(config.options, NativeStoreConfig)
    return config.options


def test_one_key_turns_a_configuration_written_for_ucm_into_the_native_store() -> None:
    config = native(store_pipeline="Posix", storage_backends="/mnt/a", posix_gc_enable=True)
    assert config.connector_name == "UcmPipelineStore"
    assert config.storage_backends == ("/mnt/a",)
    assert config.options["posix_gc_enable"] is True
    assert config.keeps_plain_files


def test_the_flat_form_means_the_native_posix_store() -> None:
    config = StoreConfig.from_mapping({"engine": "native", "storage_backends": "/mnt/a"})
    assert config.options == native(storage_backends="/mnt/a")
    assert config.storage_roots == ("/mnt/a",)


def test_deadlines_are_ours_for_every_engine() -> None:
    config = native(storage_backends="/mnt/a", load_timeout_s="1.5", io_threads=2, accept_unverified=False)
    own = config.own
    assert (own.load_timeout_s, own.io_threads, own.accept_unverified) == (1.5, 2, False)
    assert not {"load_timeout_s", "io_threads", "accept_unverified"} & config.options.keys()


def test_defaults_that_suit_the_native_store_give_way_to_the_users() -> None:
    assert native(storage_backends="/a").options["io_direct"] is False
    assert native(storage_backends="/a", io_direct=True).options["io_direct"] is True
    assert (
        native(storage_backends="/a", posix_data_trans_concurrency=32).options["posix_data_trans_concurrency"]
        == 32
    )


def test_sizes_come_from_the_pool_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = native(storage_backends="/a", block_size=0, tensor_size=7, timeout_ms=100)
    assert not {"block_size", "tensor_size", "timeout_ms"} & config.options.keys()
    assert caplog.messages == [
        "these options of the native store are set for it: block_size, tensor_size, timeout_ms"
    ]


def test_other_pipelines_get_their_options_as_they_are() -> None:
    config = native(store_pipeline="Mooncake", master_server_address="host:1", storage_backends="/a:/b")
    assert not config.keeps_plain_files
    assert config.options["master_server_address"] == "host:1"
    assert native(store_pipeline="Mooncake").storage_backends == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage_backends": "/a:/b"}, r"'storage_backends' is \['/a', '/b'\]; expected one directory"),
        ({}, r"'storage_backends' is \[\]; expected one directory"),
        ({"storage_backends": "/a", "data_dir_shard_bytes": 2}, "'data_dir_shard_bytes' is 2; expected"),
        ({"storage_backends": "/a", "load_timeout_s": 0}, "'load_timeout_s' is 0; expected"),
        ({"storage_backends": "/a", "durability": "full"}, "'durability' does not work with engine"),
        ({"storage_backends": "/a", "native_package": 5}, "'native_package' is 5; expected"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(StoreConfigError, match=message):
        native(**options)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StoreConfigError, match="'engine' is 'other'; expected 'embedded' or 'native'"):
        StoreConfig.from_mapping({"storage_backends": "/a", "engine": "other"})


def test_a_pipeline_of_ucms_own_names_the_engine_it_needs() -> None:
    with pytest.raises(StoreConfigError, match=r"'store_pipeline' is 'Mooncake'.*'engine' set to 'native'"):
        StoreConfig.from_mapping({"storage_backends": "/a", "store_pipeline": "Mooncake"})


def test_without_ucms_package_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "FACTORY_MODULE", "ucm.store.factory_of_nobody")
    config = StoreConfig.from_mapping({"engine": "native", "storage_backends": str(tmp_path)})
    with pytest.raises(StoreConfigError, match=r"pip install --target DIR .*'native_package' to DIR"):
        open_store(SPEC, config)


def test_direct_io_is_refused_for_pages_that_it_cannot_store(tmp_path: Path) -> None:
    options = {"engine": "native", "storage_backends": str(tmp_path), "io_direct": "true"}
    with pytest.raises(StoreConfigError, match=r"'io_direct' is true; expected false.* has 5000 bytes"):
        open_store(SPEC, StoreConfig.from_mapping(options))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_ucms_package_is_named(tmp_path: Path) -> None:
    config = StoreConfig.from_mapping(
        {"engine": "native", "storage_backends": str(tmp_path / "kv"), "native_package": str(tmp_path)}
    )
    with pytest.raises(StoreConfigError, match=f"'native_package' is '{tmp_path}'; expected the directory"):
        open_store(SPEC, config)


def test_blocks_of_another_kind_are_refused_before_the_native_store_sees_them(tmp_path: Path) -> None:
    config = StoreConfig.from_mapping({"engine": "native", "storage_backends": str(tmp_path)})
    claim_identity(config, "pool", {"dtype": "bfloat16"})
    with pytest.raises(StoreConfigError, match=r"dtype.*'bfloat16'.*'fp8'"):
        claim_identity(config, "pool", {"dtype": "fp8"})
    embedded = StoreConfig.from_mapping({"storage_backends": str(tmp_path)})
    with pytest.raises(StoreConfigError, match="dtype"):
        claim_identity(embedded, "pool", {"dtype": "fp8"})
