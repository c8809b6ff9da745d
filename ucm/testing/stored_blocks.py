# SPDX-License-Identifier: MIT
"""The blocks of our backend as files, found without its own code.

The key texts and directories are written out here a second time, from the description of the format, so that
a change of either shows as a failing test instead of a cache that nobody finds any more.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_DIGEST_HEX = 32
_SHARD_HEX = 3


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """What one model has stored.

    Attributes:
        root: The only storage root.
        model: The served model's name.
        replicated: The model's KV is the same on all ranks (MLA, DeepSeek V4).
        tp_size: How many TP ranks the server has.
    """

    root: Path
    model: str
    replicated: bool = False
    tp_size: int = 1

    def counts(self) -> dict[str, int]:
        """Return the number of blocks in each namespace; the primary's is the empty one."""
        files = (path for path in self.root.rglob("?" * _DIGEST_HEX) if path.is_file())
        return dict(Counter(str(path.parent.parent.relative_to(self.root)) for path in files))

    def primary(self, page_hash: str, rank: int = 0) -> Path:
        """Return where a page of the primary KV pool is stored by a TP rank."""
        return self._path(Path(), page_hash + self._model_suffix(rank))

    def sidecar(self, namespace: str, page_hash: str, rank: int = 0) -> Path:
        """Return where a page of a sidecar is stored.

        Args:
            namespace: For example `mamba_476x1`: pool, bytes of a component, number of components.
            page_hash: SGLang's hash of the page.
            rank: The TP rank that stores it; 0 for what all ranks hold alike.
        """
        pool = namespace.rsplit("_", 1)[0]
        ranks = f"__v2_tp_{rank}_{self.tp_size}"
        suffix = f"{self._model_suffix(rank)}{ranks}__pool_{pool}__component_0"
        return self._path(Path("sglang_v2", namespace), page_hash + suffix)

    def _model_suffix(self, rank: int) -> str:
        return f"_{self.model}" if self.replicated else f"_{self.model}_{rank}_{self.tp_size}"

    def _path(self, namespace: Path, key_text: str) -> Path:
        digest = hashlib.md5(key_text.encode(), usedforsecurity=False).hexdigest()
        return self.root / namespace / digest[:_SHARD_HEX] / digest
