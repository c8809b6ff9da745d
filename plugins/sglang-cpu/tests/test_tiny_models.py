# SPDX-License-Identifier: MIT
"""The tiny Qwen3.5: what any loader of such checkpoints must accept, and weights that make a cache matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from sglang_cpu.tiny_models import __main__ as command
from sglang_cpu.tiny_models import qwen3_5
from transformers import Qwen3_5ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_5")
    qwen3_5.write(directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def model(model_path: Path) -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM.from_pretrained(model_path, dtype=torch.float32)


def test_transformers_finds_every_weight_and_no_other(model_path: Path) -> None:
    _, report = Qwen3_5ForCausalLM.from_pretrained(model_path, output_loading_info=True)

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_the_last_token_depends_on_the_first(model: Qwen3_5ForCausalLM) -> None:
    prompt = torch.randint(3, qwen3_5.VOCABULARY, (1, 300), generator=torch.Generator().manual_seed(0))
    other = prompt.clone()
    other[0, 0] = prompt[0, 0] % 256 + 200

    with torch.inference_mode():
        logits, other_logits = (model(tokens).logits[0, -1].log_softmax(-1) for tokens in (prompt, other))

    # Tests of caches compare log-probabilities within 1e-5.
    assert (logits - other_logits).abs().max() > 1e-2


def test_the_same_seed_writes_the_same_weights(tmp_path: Path, model_path: Path) -> None:
    qwen3_5.write(tmp_path, seed=0)

    assert (tmp_path / "model.safetensors").read_bytes() == (model_path / "model.safetensors").read_bytes()


def test_another_seed_writes_other_weights(tmp_path: Path, model_path: Path) -> None:
    qwen3_5.write(tmp_path, seed=1)

    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path, model_path))
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_command_line_creates_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "new" / "model"
    monkeypatch.setattr("sys.argv", ["tiny_models", "qwen3_5", str(directory), "--seed", "3"])

    command.main()

    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors"}
