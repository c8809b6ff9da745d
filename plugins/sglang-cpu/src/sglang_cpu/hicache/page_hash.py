# SPDX-License-Identifier: MIT
"""The names of pages: a chain of SHA-256 digests, each over the digest before it and one page's tokens.

SGLang compiles this at the first request, which takes half a minute, a C++ compiler and OpenSSL's headers.
The digests here are the same (SGLang 0.5.23): a cache written with either is found with the other.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST_NARROW_TOKEN = 2**32 - 1
# Sets pages that do not fit 32 bits apart: the bytes of a narrow page are a multiple of four.
_WIDE_PAGE_MARK = b"\xff"


class PageHasher:
    """Stands in for SGLang's compiled extension module."""

    def get_hash(
        self,
        raw_tokens: Sequence[int],
        logical_len: int,
        unit_width: int,
        is_bigram: bool,
        prior_digest: bytes | None,
        page_size: int | None = None,
    ) -> str | list[str]:
        """Hash tokens as one page, or page by page.

        Args:
            raw_tokens: Non-negative token ids.
            logical_len: Units to hash.
            unit_width: Tokens in a unit.
            is_bigram: A unit is a token and its successor; `raw_tokens` has one more than `logical_len`.
            prior_digest: Digest the chain continues from.
            page_size: Units in a page; the last page may be shorter. None: all units are one page.

        Returns:
            The digest in hexadecimal, or a list of one per page.
        """
        digest = prior_digest or b""
        if page_size is None:
            return _digest(digest, _page(raw_tokens, 0, logical_len, unit_width, is_bigram)).hex()
        digests = []
        for start in range(0, logical_len, page_size):
            end = min(start + page_size, logical_len)
            digest = _digest(digest, _page(raw_tokens, start, end, unit_width, is_bigram))
            digests.append(digest.hex())
        return digests


def _page(raw_tokens: Sequence[int], start: int, end: int, unit_width: int, is_bigram: bool) -> Sequence[int]:
    if is_bigram:
        return [token for i in range(start, end) for token in raw_tokens[i : i + 2]]
    return raw_tokens[start * unit_width : end * unit_width]


def _digest(prior_digest: bytes, tokens: Sequence[int]) -> bytes:
    if max(tokens, default=0) <= _LARGEST_NARROW_TOKEN:
        page = _little_endian(array("I", tokens))
    else:
        page = _WIDE_PAGE_MARK + _little_endian(array("Q", tokens))
    return hashlib.sha256(prior_digest + page).digest()


def _little_endian(words: array[int]) -> bytes:
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


HASHER = PageHasher()


def load() -> PageHasher:
    """Return the hasher instead of compiling one."""
    return HASHER
