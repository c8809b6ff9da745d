# SPDX-License-Identifier: MIT
"""Pages of a host pool as the memory segments a store reads from and writes into.

The only module that takes raw addresses from SGLang. Each of them belongs to a page inside the pool, and
becomes a `memoryview` of the length that was fixed when the pool was registered.
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ucm.integration.sglang.errors import UnsupportedPoolError
from ucm.integration.sglang.sglang_compat import index_limit, indices_per_page, page_buffer_meta, page_parts
from ucm.store.host_memory import copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.integration.sglang.sglang_compat import HostPool

_STAGING_BYTES = 64 << 20


Page = list[memoryview]
"""The segments of one page, in storage order."""


class Arrival(NamedTuple):
    """Memory to load one page into, and what then makes it visible in the pool, if it lies elsewhere."""

    segments: Page
    publish: Callable[[], None] | None = None


class PageAccess(Protocol):
    """How the pages of one pool meet the store.

    Attributes:
        segment_bytes: Length of each segment of a page; never changes.
        component_bytes: Length of each component, as a pool's namespace counts them.
        indices_per_page: Host indices that stand for one page.
        batch_pages: Pages that one load may cover; None is any number.
    """

    segment_bytes: tuple[int, ...]
    component_bytes: tuple[int, ...]
    indices_per_page: int
    batch_pages: int | None

    def outgoing(self, host_indices: torch.Tensor) -> list[Page]:
        """Return the memory to store, one entry per page.

        Args:
            host_indices: All host indices of the pages, page after page.

        Raises:
            ValueError: An index is outside the pool, or the pages no longer have
                the parts that were registered.
        """
        ...

    def incoming(self, host_indices: torch.Tensor) -> list[Arrival]:
        """Return the memory to load into, one entry per page; raises like `outgoing`."""
        ...

    def take_back(self, arrivals: Sequence[Arrival]) -> None:
        """Use the memory that `incoming` returned for other pages from now on."""
        ...


class _PagesInPlace:
    """The host pages themselves, as views that are checked against what was registered."""

    def __init__(self, pool: str, host_pool: HostPool) -> None:
        self._host_pool = host_pool
        self.indices_per_page = indices_per_page(host_pool)
        self._index_limit = index_limit(host_pool)
        # Sizes of the parts of one page as the pool lists them, empty parts included.
        self._part_bytes = probe_parts(pool, host_pool)
        self.segment_bytes = tuple(size for size in self._part_bytes if size > 0)
        self._segments = [
            (part, (ctypes.c_char * size).from_address)
            for part, size in enumerate(self._part_bytes)
            if size > 0
        ]

    def outgoing(self, host_indices: torch.Tensor) -> list[Page]:
        """Return views of the host pages."""
        pointers = self._part_pointers(host_indices)
        width = len(self._part_bytes)
        return [
            [memoryview(at_address(pointers[first + part])).cast("B") for part, at_address in self._segments]
            for first in range(0, len(pointers), width)
        ]

    def _part_pointers(self, host_indices: torch.Tensor) -> Sequence[int]:
        """Return the address of each part, page after page, if all of them are as registered."""
        count = len(self._starts(host_indices))
        pointers, sizes, width = page_parts(page_buffer_meta(self._host_pool, host_indices), count)
        if list(sizes) != list(self._part_bytes) * count:
            raise ValueError(_changed(sizes[:width], self._part_bytes))
        return pointers

    def _starts(self, host_indices: torch.Tensor) -> list[int]:
        """Return the first host index of each page; none reaches out of the pool."""
        starts: list[int] = host_indices[:: self.indices_per_page].tolist()
        if starts and not 0 <= min(starts) <= max(starts) <= self._index_limit - self.indices_per_page:
            raise ValueError(
                f"pages start at {min(starts)} to {max(starts)} and have {self.indices_per_page} indices, "
                f"the pool has [0, {self._index_limit})"
            )
        return starts


class ZeroCopyAccess(_PagesInPlace):
    """The store reads and writes the host pages in place.

    Raises:
        UnsupportedPoolError: The pool gives no pointers, or parts of different sizes.
    """

    batch_pages: int | None = None

    def __init__(self, pool: str, host_pool: HostPool) -> None:
        super().__init__(pool, host_pool)
        self.component_bytes = self.segment_bytes
        if len(set(self.segment_bytes)) != 1:
            raise UnsupportedPoolError.because(
                pool,
                host_pool,
                f"has pages with parts of {list(self._part_bytes)} bytes; only parts of equal size can be "
                "stored, so K and V of different width cannot: start without --hicache-storage-backend",
            )

    def incoming(self, host_indices: torch.Tensor) -> list[Arrival]:
        """Return views of the host pages."""
        return [Arrival(page) for page in self.outgoing(host_indices)]

    def take_back(self, arrivals: Sequence[Arrival]) -> None:
        """Do nothing: the pages lie where they were loaded."""


class StagedAccess(_PagesInPlace):
    """The store reads the host pages in place, and fills flat vectors outside the pool.

    For states, which have parts of different sizes and must be restored whole or
    not at all: a vector is copied into the pool only once it is complete and verified. It
    holds the parts one after the other, as the stored block does. At most 64 MiB,
    or one page, is staged for a load.

    Raises:
        UnsupportedPoolError: The pool gives no pointers, or its flat pages are
            something else than its parts.
    """

    def __init__(self, pool: str, host_pool: HostPool) -> None:
        super().__init__(pool, host_pool)
        vector = _as_bytes(host_pool.get_dummy_flat_data_page())
        if not self.segment_bytes or sum(self.segment_bytes) != vector.nbytes:
            raise UnsupportedPoolError.because(
                pool,
                host_pool,
                f"has flat pages of {vector.nbytes} bytes but parts of {list(self._part_bytes)}; "
                "such a pool cannot be stored: start without --hicache-storage-backend",
            )
        self.component_bytes: tuple[int, ...] = (vector.nbytes,)
        self.batch_pages: int | None = max(1, _STAGING_BYTES // vector.nbytes)
        self._spare: deque[memoryview] = deque([vector], maxlen=self.batch_pages)

    def incoming(self, host_indices: torch.Tensor) -> list[Arrival]:
        """Return vectors outside the pool, one for each page, cut into its parts."""
        arrivals = []
        for page in self.outgoing(host_indices):
            vector = split(self._take(), self.segment_bytes)
            arrivals.append(Arrival(vector, partial(_copy_parts, page, vector)))
        return arrivals

    def take_back(self, arrivals: Sequence[Arrival]) -> None:
        """Stage later pages in the same vectors."""
        # A slice still belongs to what it was cut from.
        self._spare.extend(memoryview(arrival.segments[0].obj) for arrival in arrivals)

    def _take(self) -> memoryview:
        try:
            return self._spare.pop()
        except IndexError:
            return _as_bytes(self._host_pool.get_dummy_flat_data_page())


def _copy_parts(page: Page, loaded: Page) -> None:
    for part, there in zip(page, loaded, strict=True):
        copy(part, there)


def probe_parts(pool: str, host_pool: HostPool) -> tuple[int, ...]:
    """Return the sizes of the parts of the pool's first page; empty if the pool has no bytes.

    Raises:
        UnsupportedPoolError: The pool cannot tell.
    """
    indices = torch.arange(indices_per_page(host_pool), dtype=torch.int64)
    try:
        _, sizes, _ = page_parts(page_buffer_meta(host_pool, indices), 1)
    except (AttributeError, NotImplementedError, ValueError) as exc:
        raise UnsupportedPoolError.because(
            pool,
            host_pool,
            f"gives no page pointers ({exc}); such a pool cannot be stored: "
            "start without --hicache-storage-backend",
        ) from exc
    return tuple(sizes) if any(sizes) else ()


def flat_page(page: torch.Tensor, segment_bytes: Sequence[int]) -> Page:
    """Split a flat page tensor, as SGLang copies them, into segments of the given lengths.

    Raises:
        ValueError: The tensor is not contiguous, or has another size.
    """
    return split(_as_bytes(page), segment_bytes)


def split(vector: memoryview, segment_bytes: Sequence[int]) -> Page:
    """Cut a vector into segments of the given lengths.

    Raises:
        ValueError: It has another size.
    """
    ends = list(accumulate(segment_bytes))
    if vector.nbytes != ends[-1]:
        raise ValueError(_changed([vector.nbytes], segment_bytes))
    return [vector[end - size : end] for end, size in zip(ends, segment_bytes, strict=True)]


def _changed(now: Sequence[int], registered: Sequence[int]) -> str:
    return f"pages have changed: parts of {list(now)} bytes, registered with {list(registered)}"


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; it stays alive with the view."""
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy())
