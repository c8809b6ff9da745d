# SPDX-License-Identifier: MIT
"""KnownKeys: what was seen in storage, so that a long lookup need not ask for all of it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.interface import BlockKey

# Some 100 bytes a key; twice as many are kept at most.
_GENERATION_KEYS = 32_768
SPOT_CHECKS = 8
"""Known keys of a lookup that are asked for all the same."""


class KnownKeys:
    """The blocks that this process has written or found, the most recent ones.

    Another process may have removed some of them. So a few of each lookup are asked for,
    the first and the last among them: eviction takes whole prefixes, or ends of them. One
    that is gone, then or when it is to be loaded, ends the trust in all.
    A lookup of no more than `SPOT_CHECKS` known keys asks for every one.
    """

    def __init__(self) -> None:
        # Replaced and added to, never iterated: safe from any thread.
        self._young: set[BlockKey] = set()
        self._old: set[BlockKey] = set()

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Remember keys, and forget the oldest if there are too many."""
        self._young.update(keys)
        if len(self._young) > _GENERATION_KEYS:
            self._young, self._old = set(), self._young

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Forget keys that are gone."""
        for key in keys:
            self._young.discard(key)
            self._old.discard(key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._young or key in self._old

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = set(), set()

    def to_ask(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the indices of those keys that storage has to be asked for, ascending."""
        young, old = self._young, self._old
        known = [index for index, key in enumerate(keys) if key in young or key in old]
        if len(known) <= SPOT_CHECKS:
            return list(range(len(keys)))
        last = len(known) - 1
        checked = {known[spot * last // (SPOT_CHECKS - 1)] for spot in range(SPOT_CHECKS)}
        trusted = set(known) - checked
        return [index for index in range(len(keys)) if index not in trusted]
