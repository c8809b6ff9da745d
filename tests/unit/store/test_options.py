# SPDX-License-Identifier: MIT
"""Settings: equal spellings mean the same, mistakes name key, value and what is expected."""

from __future__ import annotations

import pytest

from ucm.store import StoreConfigError
from ucm.store.options import as_bool, as_directories, as_int, as_mapping, as_seconds, as_text, reject_unknown


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
