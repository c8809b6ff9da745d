# SPDX-License-Identifier: MIT
"""Tiny models with random weights, written as checkpoints that SGLang loads like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_cpu.tiny_models import deepseek_v4, qwen3_5

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRITERS: dict[str, Callable[[Path, int], None]] = {
    "deepseek_v4": deepseek_v4.write_small,
    "deepseek_v4_mtp": deepseek_v4.write_small_mtp,
    "deepseek_v4_flash43_mtp": deepseek_v4.write_flash43_mtp,
    "qwen3_5": qwen3_5.write,
}
"""By family: a function that writes a model into an existing directory, the same bytes for the same seed."""
