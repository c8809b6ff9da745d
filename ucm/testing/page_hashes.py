# SPDX-License-Identifier: MIT
"""SGLang's own names of a prompt's pages."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

if TYPE_CHECKING:
    from collections.abc import Sequence


def page_hashes(tokens: Sequence[int], page_tokens: int) -> list[str]:
    """Return the storage hash of each whole page of a prompt."""
    key = RadixKey(array("q", tokens)).page_aligned(page_tokens)
    hashes: list[str] = get_storage_hash_str(key, None, page_tokens)
    return hashes
