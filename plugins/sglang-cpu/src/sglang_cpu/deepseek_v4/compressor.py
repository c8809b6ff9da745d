# SPDX-License-Identifier: MIT
"""Compression of every `ratio` tokens into one entry, and the ring that carries unfinished windows over.

A row of input is `[key-value | score]`. With ratio 4 both halves are doubled: the first part of a token
counts in the *next* window's entry, the second in its own, so windows overlap by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OVERLAP_RATIO = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """The shape of one compressor."""

    ratio: int
    head_dim: int

    @property
    def overlaps(self) -> bool:
        """Whether a window also draws on the one before it."""
        return self.ratio == OVERLAP_RATIO

    @property
    def window_tokens(self) -> int:
        """Tokens that one entry is made of."""
        return self.ratio * (2 if self.overlaps else 1)

    def closing_positions(self, start: int, end: int) -> torch.Tensor:
        """Return the positions in `[start, end)` at which an entry is complete."""
        first = (start // self.ratio + 1) * self.ratio - 1
        return torch.arange(first, max(first, end), self.ratio)

    def carried_tokens(self, start: int) -> int:
        """Return how many tokens before `start` the first entry closed at or after it needs."""
        first = (start // self.ratio + 1) * self.ratio - 1
        return min(start, self.window_tokens - 1 - (first - start))

    def written_to_ring(self, start: int, end: int, ring_rows: int, page_size: int) -> torch.Tensor:
        """Return which tokens of `[start, end)` the ring keeps, as bool: those a later entry may still need.

        These are the last windows of the sequence, a margin for draft tokens that may be rejected if the ring
        has room for them, and, where pages are shared between requests, the end of each page: whoever reuses
        the pages continues there.
        """
        position = torch.arange(start, end)
        first_needed = end // self.ratio * self.ratio - (self.ratio if self.overlaps else 0)
        spare = ring_rows - self.window_tokens
        kept = position >= min(first_needed, end - (spare + 2 if spare > 0 else 0))
        if self.overlaps:
            kept |= position % page_size >= page_size - self.ratio
        return kept

    def pool(
        self, rows: torch.Tensor, start: int, position_bias: torch.Tensor, closing: torch.Tensor
    ) -> torch.Tensor:
        """Return the entries closed at `closing`, `[entries, head_dim]` float64, before norm and rotation.

        Args:
            rows: `[tokens, 2 * parts * head_dim]`, consecutive tokens, the first at position `start`.
            start: See `rows`.
            position_bias: `[window_tokens, head_dim]`, added to the scores.
            closing: Positions from `closing_positions`.
        """
        position = closing.unsqueeze(1) + torch.arange(1 - self.window_tokens, 1)
        window = rows[(position - start).clamp_min(0)].double()
        values, scores = window.chunk(2, dim=-1)
        if self.overlaps:
            values, scores = self._join(values), self._join(scores)
        scores = scores + position_bias.double()
        scores = scores.masked_fill((position < 0).unsqueeze(-1), float("-inf"))
        return (scores.softmax(1) * values).sum(1)

    def _join(self, parts: torch.Tensor) -> torch.Tensor:
        """Take the first part of the previous window's tokens and the second part of the own ones."""
        previous = parts[:, : self.ratio, : self.head_dim]
        own = parts[:, self.ratio :, self.head_dim :]
        return torch.cat([previous, own], dim=1)
