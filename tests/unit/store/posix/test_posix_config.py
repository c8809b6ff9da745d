# SPDX-License-Identifier: MIT
"""PosixStoreConfig: parsed once, then trusted."""

from __future__ import annotations

import pytest

from ucm.store import StoreConfigError
from ucm.store.options import Capacity
from ucm.store.posix.config import OPTION_NAMES, PosixStoreConfig
from ucm.store.posix.durability import Durability
from ucm.store.posix.reading import IoMode


def test_where_to_store_is_all_that_is_required() -> None:
    config = PosixStoreConfig.from_mapping({"storage_backends": "/mnt/a"})
    assert config == PosixStoreConfig(
        ("/mnt/a",), 8, 5.0, 30.0, 2.0, accept_unverified=True, capacity_bytes=None
    )


def test_where_to_store_is_required() -> None:
    with pytest.raises(StoreConfigError, match="'storage_backends' is required"):
        PosixStoreConfig.from_mapping({"io_threads": 4})


def test_every_option_can_be_given_as_text() -> None:
    raw = {
        "storage_backends": "/a:/b",
        "io_threads": "16",
        "load_timeout_s": "1.5",
        "dump_timeout_s": "60",
        "lookup_timeout_s": "0.5",
        "accept_unverified": "false",
        "durability": "Full",
        "io_mode": "direct",
        "capacity_bytes": "1GB",
    }
    assert raw.keys() == OPTION_NAMES
    assert PosixStoreConfig.from_mapping(raw) == PosixStoreConfig(
        ("/a", "/b"),
        16,
        1.5,
        60.0,
        0.5,
        accept_unverified=False,
        durability=Durability.FULL,
        io_mode=IoMode.DIRECT,
        capacity_bytes=Capacity(10**9),
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("storage_backends", 5),
        ("io_threads", 17),
        ("io_threads", 0),
        ("load_timeout_s", 0),
        ("dump_timeout_s", "soon"),
        ("lookup_timeout_s", None),
        ("accept_unverified", "perhaps"),
        ("durability", "fsync"),
        ("capacity_bytes", "all of it"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(option: str, value: object) -> None:
    with pytest.raises(StoreConfigError, match=f"'{option}' is {value!r}; expected"):
        PosixStoreConfig.from_mapping({"storage_backends": "/a", option: value})


def test_an_unknown_option_is_named_with_the_closest() -> None:
    with pytest.raises(StoreConfigError, match="'load_timeout'; did you mean 'load_timeout_s'"):
        PosixStoreConfig.from_mapping({"storage_backends": "/a", "load_timeout": 1})
