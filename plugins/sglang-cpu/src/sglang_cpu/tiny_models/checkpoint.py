# SPDX-License-Identifier: MIT
"""Random weights and the files of a checkpoint."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class RandomWeights:
    """Draws weights that keep activations near 1, so that the output depends on every layer and token.

    SGLang's own dummy weights are within 1e-3 of zero: the output is then the same whatever the cache holds.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        """Draw a matrix `[outputs, inputs]` that maps unit variance to variance `gain` squared."""
        return self.normal(outputs, inputs, std=gain / math.sqrt(inputs))

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        """Draw from a normal distribution; fp32."""
        return torch.randn(*shape, generator=self._generator) * std + mean

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        """Draw from a uniform distribution; fp32."""
        return torch.rand(*shape, generator=self._generator) * (high - low) + low


def save(directory: Path, config: Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into an existing directory. Tensors keep their types."""
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors")
