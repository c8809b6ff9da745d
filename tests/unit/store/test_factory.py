# SPDX-License-Identifier: MIT
"""From settings, ours or upstream's, to an open store."""

from __future__ import annotations

import logging
import sys
import types
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreConfigError, StoreUnavailableError
from ucm.store.factory import StoreConfig, claim_identity, open_store
from ucm.store.memory import MemoryStore
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.store_conformance import DONE, SPEC, assert_loads, outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ucm.store import StoreSpec

AT_A = PosixStoreConfig(("/mnt/a",))


def test_the_flat_form_opens_the_embedded_store_where_it_says(tmp_path: Path) -> None:
    store = open_store(SPEC, StoreConfig.from_mapping({"storage_backends": str(tmp_path / "new")}))
    assert isinstance(store, PosixStore)
    assert store.dump(outgoing([1])) == [DONE]
    assert_loads(store, [1])
    assert (tmp_path / "new" / SPEC.namespace).is_dir()
    store.close()


@pytest.mark.parametrize("name", ["UcmPosixStore", "UcmPipelineStore", "UcmNfsStore", "UcmPcStore"])
def test_upstreams_posix_stores_are_the_embedded_store(name: str) -> None:
    raw = {"ucm_connector_name": name, "ucm_connector_config": {"storage_backends": "/mnt/a"}}
    assert StoreConfig.from_mapping(raw).options == AT_A


@pytest.mark.parametrize("pipeline", ["Posix", "Cache|Posix"])
def test_upstreams_posix_pipeline_is_the_embedded_store(pipeline: str) -> None:
    raw = {
        "ucm_connector_name": "UcmPipelineStore",
        "ucm_connector_module_path": "ucm.store.pipeline.connector",
        "ucm_connector_config": {"store_pipeline": pipeline, "storage_backends": "/mnt/a"},
    }
    assert StoreConfig.from_mapping(raw).options == AT_A


def test_another_pipeline_is_refused_by_name() -> None:
    with pytest.raises(StoreConfigError, match="'store_pipeline' is 'Mooncake'; expected one of"):
        StoreConfig.from_mapping({"storage_backends": "/a", "store_pipeline": "Mooncake"})


def test_upstreams_tuning_is_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    raw = {"storage_backends": "/mnt/a", "io_direct": True, "stream_number": 8, "posix_gc_enable": True}
    with caplog.at_level(logging.INFO):
        assert StoreConfig.from_mapping(raw).options == AT_A
    assert [record.getMessage() for record in caplog.records] == [
        "these upstream store options have no effect here: io_direct, posix_gc_enable, stream_number"
    ]


def test_options_beside_the_nested_ones_are_refused() -> None:
    raw = {"ucm_connector_config": {"storage_backends": "/a"}, "io_threads": 2}
    with pytest.raises(StoreConfigError, match="'io_threads'"):
        StoreConfig.from_mapping(raw)


def test_an_unknown_store_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        StoreConfigError, match=r"'UcmFooStore'; expected one of .*'UcmPosixStore'.*module_path"
    ):
        StoreConfig.from_mapping({"ucm_connector_name": "UcmFooStore", "storage_backends": "/a"})


def test_the_users_mapping_is_left_as_it_is() -> None:
    raw = {"storage_backends": "/mnt/a", "io_direct": True, "store_pipeline": "Posix"}
    before = dict(raw)
    StoreConfig.from_mapping(raw)
    assert raw == before


def custom_module(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    module = types.ModuleType("custom_stores")
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, "custom_stores", module)


def custom(name: str, module_path: str = "custom_stores") -> StoreConfig:
    return StoreConfig.from_mapping(
        {
            "ucm_connector_name": name,
            "ucm_connector_module_path": module_path,
            "ucm_connector_config": {"volume": 7},
        }
    )


def test_a_store_of_ones_own_gets_the_spec_and_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, object]] = []

    def make(spec: StoreSpec, options: Mapping[str, object]) -> MemoryStore:
        given.append(options)
        return MemoryStore(spec)

    custom_module(monkeypatch, make=make)
    store = open_store(SPEC, custom("make"))
    assert store.spec == SPEC
    assert given == [{"volume": 7}]


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(StoreConfigError, match="'ucm_connector_module_path' is 'no_such_module'; expected"):
        open_store(SPEC, custom("make", "no_such_module"))


def test_a_name_missing_from_its_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_module(monkeypatch)
    with pytest.raises(
        StoreConfigError, match=r"'ucm_connector_name' is 'absent'; expected .*'custom_stores'"
    ):
        open_store(SPEC, custom("absent"))


def test_something_that_is_no_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_module(monkeypatch, make=lambda spec, options: {spec: options})
    with pytest.raises(StoreConfigError, match=r"custom_stores\.make gave a dict; expected a KVStore"):
        open_store(SPEC, custom("make"))


def test_a_root_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = StoreConfig.from_mapping({"storage_backends": str(tmp_path / "file" / "kv")})
    with pytest.raises(
        StoreUnavailableError, match=f"{tmp_path}/file/kv.*Not a directory.*'storage_backends'"
    ):
        open_store(SPEC, config)


def test_an_identity_is_claimed_under_every_root(tmp_path: Path) -> None:
    config = StoreConfig.from_mapping({"storage_backends": [str(tmp_path / "a"), str(tmp_path / "b")]})
    claim_identity(config, "pool", {"dtype": "bfloat16"})
    assert len(list(tmp_path.glob("*/.ucm/identity/*.json"))) == 2
    with pytest.raises(StoreConfigError, match="dtype"):
        claim_identity(config, "pool", {"dtype": "fp8"})


def test_a_store_without_directories_has_no_identity_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_module(monkeypatch, make=MemoryStore)
    assert custom("make").storage_roots == ()
    claim_identity(custom("make"), "pool", {"dtype": "bfloat16"})
