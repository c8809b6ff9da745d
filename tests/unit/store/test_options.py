# SPDX-License-Identifier: MIT
"""Settings: equal spellings mean the same, mistakes name key, value and what is expected."""

from __future__ import annotations

import pytest

from ucm.store import StoreConfigError
from ucm.store.options import (
    Capacity,
    as_bool,
    as_capacity,
    as_directories,
    as_int,
    as_mapping,
    as_seconds,
    as_text,
    reject_unknown,
)


@pytest.mark.parametrize("value", [True, 1, "1", "true", "True", " TRUE ", "yes", "on"])
def test_all_spellings_of_true_are_the_same(value: object) -> None:
    assert as_bool("io_direct", value) is True


@pytest.mark.parametrize("value", [False, 0, "0", "false", "False", "no", "off"])
def test_all_spellings_of_false_are_the_same(value: object) -> None:
    assert as_bool("io_direct", value) is False


@pytest.mark.parametrize("value", [None, 2, "maybe", "", [], 1.5])
def test_anything_else_is_no_boolean(value: object) -> None:
    with pytest.raises(StoreConfigError, match=r"'io_direct' is .*; expected true or false"):
        as_bool("io_direct", value)


@pytest.mark.parametrize("value", [8, "8", " 8 "])
def test_a_whole_number_may_come_as_text(value: object) -> None:
    assert as_int("io_threads", value, 1, 16) == 8


@pytest.mark.parametrize("value", [0, 17, "17", True, 8.0, "eight", None])
def test_a_number_out_of_range_or_kind_is_refused(value: object) -> None:
    with pytest.raises(StoreConfigError, match=r"'io_threads' is .*; expected a whole number from 1 to 16"):
        as_int("io_threads", value, 1, 16)


@pytest.mark.parametrize(("value", "seconds"), [(5, 5.0), (0.25, 0.25), ("2.5", 2.5)])
def test_seconds_may_be_whole_broken_or_text(value: object, seconds: float) -> None:
    assert as_seconds("load_timeout_s", value) == seconds


@pytest.mark.parametrize("value", [0, -1, "nan", float("inf"), True, "5s", None])
def test_seconds_must_be_positive_and_finite(value: object) -> None:
    with pytest.raises(
        StoreConfigError, match=r"'load_timeout_s' is .*; expected a positive number of seconds"
    ):
        as_seconds("load_timeout_s", value)


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (500_000_000_000, 500_000_000_000),
        ("500000000000", 500_000_000_000),
        ("500GB", 500_000_000_000),
        (" 500 gb ", 500_000_000_000),
        ("0.5T", 500_000_000_000),
        (5e11, 500_000_000_000),
        ("1.5TiB", 3 * 2**39),
        ("64KiB", 65_536),
        ("1B", 1),
    ],
)
def test_a_capacity_may_be_a_number_or_a_size(value: object, size_bytes: int) -> None:
    assert as_capacity("capacity_bytes", value) == Capacity(size_bytes)


@pytest.mark.parametrize("value", ["80%", "80 %", "80.0%", Capacity(share=0.8)])
def test_a_capacity_may_be_a_share_of_the_file_system(value: object) -> None:
    capacity = as_capacity("capacity_bytes", value)
    assert capacity is not None
    assert capacity.of(1000) == 800


def test_no_capacity_stays_none() -> None:
    assert as_capacity("capacity_bytes", None) is None


@pytest.mark.parametrize(
    "value", [0, -1, "0GB", "", "much", "5 XB", "1.5.2GB", "GB", True, [], "1i", "0%", "101%", "-5%"]
)
def test_anything_else_is_no_capacity(value: object) -> None:
    with pytest.raises(StoreConfigError, match=r"'capacity_bytes' is .*; expected a"):
        as_capacity("capacity_bytes", value)


@pytest.mark.parametrize("value", ["/a:/b", ["/a", "/b"], ("/a/", "/b/."), " /a : /b ", "/a::/b:"])
def test_a_list_and_a_joined_string_of_directories_are_the_same(value: object) -> None:
    assert as_directories("storage_backends", value) == ("/a", "/b")


@pytest.mark.parametrize("value", [None, "", ":", [], [1], {"a": 1}, 5])
def test_anything_else_is_no_directory(value: object) -> None:
    with pytest.raises(StoreConfigError, match=r"'storage_backends' is .*; expected one directory"):
        as_directories("storage_backends", value)


def test_a_directory_twice_is_refused() -> None:
    with pytest.raises(StoreConfigError, match="different directories"):
        as_directories("storage_backends", "/a:/a/")


def test_an_unknown_key_is_named_with_the_closest_valid_one() -> None:
    with pytest.raises(StoreConfigError, match="unknown store option 'io_thread'; did you mean 'io_threads'"):
        reject_unknown({"io_thread": 1}, ["io_threads", "load_timeout_s"], "store option")


def test_a_key_unlike_any_is_named_with_all_valid_ones() -> None:
    with pytest.raises(StoreConfigError, match="unknown store option 'zzz'; valid ones are a_b, c_d"):
        reject_unknown({"zzz": 1}, ["c_d", "a_b"], "store option")


@pytest.mark.parametrize("value", [None, "text", [], {1: 2}])
def test_only_a_mapping_with_text_keys_is_one(value: object) -> None:
    with pytest.raises(StoreConfigError, match="expected a mapping"):
        as_mapping("ucm_connector_config", value)


@pytest.mark.parametrize("value", [None, "", "  ", 5])
def test_text_must_have_something_in_it(value: object) -> None:
    with pytest.raises(StoreConfigError, match="expected a non-empty string"):
        as_text("ucm_connector_name", value)
