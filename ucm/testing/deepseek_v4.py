# SPDX-License-Identifier: MIT
"""What DeepSeek V4 stores, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_TOKENS = 256

DRAFT_FLAGS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
"""What makes a server draft with the model's own extra layer (MTP)."""

# Bytes of one page in one layer (SGLang 0.5.13 to 0.5.23).
_WINDOW, _C4, _INDEXER, _C128 = 149760, 37440, 8448, 1728
_C4_STATE, _INDEXER_STATE = 65536, 16384


def page_bytes(config: Mapping[str, Any], *, drafting: bool) -> dict[str, int]:
    """Return the page size of each of the six pools, by the pool's name.

    Args:
        config: The model's `config.json`.
        drafting: Whether the server drafts with the model's extra layers: they have windows of their own, and
            the compressors' rings double.
    """
    layers = config["num_hidden_layers"]
    ratios = config["compress_ratios"][:layers]
    windows = layers + (config["num_nextn_predict_layers"] if drafting else 0)
    c4, rings = ratios.count(4), 2 if drafting else 1
    return {
        "swa": windows * _WINDOW,
        "deepseek_v4_c4": c4 * _C4,
        "deepseek_v4_c4_indexer": c4 * _INDEXER,
        "deepseek_v4_c4_state": c4 * rings * _C4_STATE,
        "deepseek_v4_c4_indexer_state": c4 * rings * _INDEXER_STATE,
        "deepseek_v4_c128": ratios.count(128) * _C128,
    }
