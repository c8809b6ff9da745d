# SPDX-License-Identifier: MIT
"""Prompts that nobody has sent before."""

from __future__ import annotations

import random

# Lower ids are control tokens in most vocabularies.
_FIRST_TOKEN_ID = 16


class PromptSource:
    """Random token ids from a seed: two prompts share no first page, nor do two runs with different seeds."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)  # noqa: S311 # Prompts are no secrets.
        self._token_ids = range(min(_FIRST_TOKEN_ID, vocabulary // 2), vocabulary)

    def take(self, tokens: int) -> tuple[int, ...]:
        """Return this many fresh tokens."""
        return tuple(self._random.choices(self._token_ids, k=tokens))
