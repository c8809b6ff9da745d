# SPDX-License-Identifier: MIT
"""Who may share bytes: the names of blocks, the directories they lie in, and their identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucm.store.interface import KEY_BYTES, BlockKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANCHOR_POOL = "kv"
"""SGLang's name for the pool that allocates host indices."""

IDENTITY_VERSION = 1
"""Grows whenever a page's stored bytes change their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """The place of this process in every group of ranks that may split a page."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for group in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, f"{group}_rank"), getattr(self, f"{group}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{group}_rank must be in [0, {size}), got {rank}")

    @property
    def pipeline_suffix(self) -> str:
        """Name the groups that split layers or tokens, where there is more than one rank."""
        groups = (
            ("pp", self.pp_rank, self.pp_size),
            ("cp", self.cp_rank, self.cp_size),
            ("dcp", self.dcp_rank, self.dcp_size),
        )
        return "".join(f"_{name}{rank}_{size}" for name, rank, size in groups if size > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOwnership:
    """Whose bytes a rank holds of one pool.

    The rule is SGLang's (0.5.23 `HiCacheStorageConfig.is_storage_writer` and
    `HybridCacheController.should_backup`); `sglang_compat.pool_ownership` applies it.

    Args:
        shard: The place of the rank.
        replicated: Every TP rank holds the same bytes; else each has its own.
    """

    shard: RankShard
    replicated: bool

    @property
    def owner(self) -> RankShard:
        """The rank that writes these bytes, and under whose name everybody looks them up.

        Two ranks hold the same bytes exactly if they have the same owner. With
        DCP that is the first rank with this DCP shard.
        """
        return replace(self.shard, tp_rank=self.shard.dcp_rank) if self.replicated else self.shard

    @property
    def writes(self) -> bool:
        """SGLang lets this rank write the pool."""
        return self.shard == self.owner


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as this process serves it.

    Args:
        name: What SGLang calls the model, taken as it is: `a/b` and `a-b` differ.
        shard: The part of it this process holds.
        replicated: Every TP rank holds the same primary KV (MLA, DeepSeek V4).
    """

    name: str
    shard: RankShard
    replicated: bool

    @property
    def key_suffix(self) -> str:
        """End of the key text of every block of this model that this rank holds."""
        ranks = "" if self.replicated else f"_{self.shard.tp_rank}_{self.shard.tp_size}"
        return f"_{self.name}{ranks}{self.shard.pipeline_suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNamespace:
    """Everything that must match before two processes may share bytes.

    Args:
        model: The model and the part of it this process holds.
        pool: Name of the pool.
        primary: The pool is stored through SGLang's v1 interface.
        ownership: Whose bytes this rank holds.
        dtype: Logical type of the values; all fp8 variants are stored as uint8.
        layout: Order of the bytes in a page.
        page_tokens: Tokens, or states, in a page.
        segment_bytes: Length of each segment of a page.
        component_bytes: Length of each component; a vector of several segments is one.
    """

    model: ServedModel
    pool: str
    primary: bool
    ownership: PoolOwnership
    dtype: str
    layout: str
    page_tokens: int
    segment_bytes: tuple[int, ...]
    component_bytes: tuple[int, ...]

    @property
    def directory(self) -> str:
        """Relative directory of the pool's blocks below each storage root."""
        if self.primary:
            return ""
        return f"sglang_v2/{self.pool}_{self.component_bytes[0]}x{len(self.component_bytes)}"

    @property
    def key_suffix(self) -> str:
        """Text that turns a page hash into the name of this rank's block."""
        if self.primary:
            return self.model.key_suffix
        owner = self.ownership.owner
        ranks = f"__v2_tp_{owner.tp_rank}_{owner.tp_size}"
        return f"{self.model.key_suffix}{ranks}__pool_{self.pool}__component_0"

    @property
    def record_name(self) -> str:
        """Name of the identity record: equal wherever two block keys could be."""
        return f"{self.directory or 'v1'}{self.key_suffix}"

    @property
    def identity(self) -> Mapping[str, object]:
        """What the bytes of a page mean; the same for all ranks that split the pool alike."""
        return {
            "version": IDENTITY_VERSION,
            "model": self.model.name,
            "pool": self.pool,
            "dtype": self.dtype,
            "layout": self.layout,
            "page_tokens": self.page_tokens,
            "segment_bytes": list(self.segment_bytes),
        }

    @property
    def identity_digest(self) -> bytes:
        """16 bytes that stand for the identity in every stored block."""
        text = json.dumps(self.identity, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def block_keys(page_hashes: Sequence[str], key_suffix: str) -> list[BlockKey]:
    """Name the block of each page; the hashes are opaque text."""
    return [
        BlockKey(hashlib.md5(f"{page_hash}{key_suffix}".encode(), usedforsecurity=False).digest())
        for page_hash in page_hashes
    ]
