# SPDX-License-Identifier: MIT
"""Parse user settings: every mistake names the key, the value and what is expected."""

from __future__ import annotations

import difflib
import enum
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ucm.store.errors import StoreConfigError

E = TypeVar("E", bound=enum.Enum)

_TRUE = (True, 1, "1", "true", "yes", "on")
_FALSE = (False, 0, "0", "false", "no", "off")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?i?b?|%)", re.IGNORECASE)
_PREFIXES = "kmgtp"


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much storage may be used.

    Args:
        size_bytes: A fixed number of bytes; 0 if it depends on the file system.
        share: Else the part of the file system's size, above 0 and at most 1.
    """

    size_bytes: int = 0
    share: float = 0.0

    def of(self, file_system_bytes: int) -> int:
        """Return the capacity in bytes on a file system of that size."""
        return self.size_bytes or int(self.share * file_system_bytes)


def reject_unknown(raw: Iterable[object], known: Collection[str], what: str) -> None:
    """Refuse keys that are not in `known`, naming the closest valid one.

    Args:
        raw: The keys given, a mapping for instance.
        known: The valid keys.
        what: What the keys are, for the message: "store option".

    Raises:
        StoreConfigError: For the first unknown key.
    """
    for key in raw:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"valid ones are {', '.join(sorted(known))}"
        raise StoreConfigError(f"unknown {what} {key!r}; {hint}")


def as_mapping(key: str, value: object) -> Mapping[str, object]:
    """Return `value` if it is a mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _wrong(key, value, "a mapping of option names to values")
    return value


def as_text(key: str, value: object) -> str:
    """Return `value` if it is text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise _wrong(key, value, "a non-empty string")
    return value.strip()


def as_bool(key: str, value: object) -> bool:
    """Read a switch; `true`, `"true"` and `1` mean the same."""
    plain = value.strip().lower() if isinstance(value, str) else value
    if isinstance(plain, (bool, int, str)):
        if plain in _TRUE:
            return True
        if plain in _FALSE:
            return False
    raise _wrong(key, value, "true or false")


def as_int(key: str, value: object, low: int, high: int) -> int:
    """Read a whole number in [low, high]; digits in a string count."""
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise _wrong(key, value, f"a whole number from {low} to {high}")
    return number


def as_seconds(key: str, value: object) -> float:
    """Read a positive, finite duration; a number in a string counts."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise _wrong(key, value, "a positive number of seconds")
    return float(number)


def as_choice(key: str, value: object, choices: type[E]) -> E:
    """Read one of an enumeration's values, in any case of letters."""
    plain = value.strip().lower() if isinstance(value, str) else value
    try:
        return choices(plain)
    except ValueError:
        names = [str(choice.value) for choice in choices]
        raise _wrong(key, value, " or ".join([", ".join(names[:-1]), names[-1]])) from None


def as_capacity(key: str, value: object) -> Capacity | None:
    """Read an amount of storage: bytes, "500GB", "1.5TiB", or "80%" of the file system; None stays None.

    kB, MB, GB, TB and PB are powers of 1000, KiB to PiB powers of 1024.
    """
    if value is None or isinstance(value, Capacity):
        return value
    expected = "a number of bytes, a size like '500GB' or '1.5TiB', or a share of the file system like '80%'"
    found = _SIZE.fullmatch(str(value).strip()) if isinstance(value, (int, float, str)) else None
    if isinstance(value, bool) or found is None:
        raise _wrong(key, value, expected)
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise _wrong(key, value, "a share above 0% and up to 100%")
        return Capacity(share=number / 100)
    power = _PREFIXES.index(unit[0]) + 1 if unit[:1] and unit[0] in _PREFIXES else 0
    size_bytes = int(number * (1024 if "i" in unit else 1000) ** power)
    if not size_bytes or unit == "i" or unit == "ib":
        raise _wrong(key, value, expected)
    return Capacity(size_bytes)


def as_directories(key: str, value: object) -> tuple[str, ...]:
    """Read directories from a list or a `:`-joined string, as absolute paths in the order given."""
    expected = "one directory, a list of them, or several joined by ':'"
    if isinstance(value, (str, os.PathLike)):
        names = [name.strip() for name in os.fspath(value).split(":")]
    elif isinstance(value, (list, tuple)) and all(isinstance(name, (str, os.PathLike)) for name in value):
        names = [os.fspath(name) for name in value]
    else:
        raise _wrong(key, value, expected)
    paths = tuple(os.path.abspath(name) for name in names if name)  # noqa: PTH100 -- Path.resolve would follow links.
    if not paths:
        raise _wrong(key, value, expected)
    if len(set(paths)) != len(paths):
        raise _wrong(key, value, "different directories")
    return paths


def _wrong(key: str, value: object, expected: str) -> StoreConfigError:
    return StoreConfigError(f"option {key!r} is {value!r}; expected {expected}")
