# SPDX-License-Identifier: MIT
from __future__ import annotations

import torch
from sglang_cpu.deepseek_v4 import numerics
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb


def freqs_cis(rows: int, rope_dim: int = 64) -> torch.Tensor:
    angles = torch.outer(torch.arange(rows) + 0.5, 10000.0 ** -(torch.arange(0, rope_dim, 2) / rope_dim))
    return torch.polar(torch.ones_like(angles), angles)


def test_the_tail_is_rotated_as_transformers_does() -> None:
    x, freqs = torch.randn(1, 5, 3, 512), freqs_cis(5)
    expected = apply_rotary_pos_emb(x, freqs.real.unsqueeze(0), freqs.imag.unsqueeze(0), unsqueeze_dim=2)
    torch.testing.assert_close(numerics.rotate_tail(x[0], freqs).float(), expected[0])


def test_the_inverse_rotation_undoes_the_rotation() -> None:
    x, freqs = torch.randn(4, 2, 64), freqs_cis(4)
    torch.testing.assert_close(numerics.rotate(numerics.rotate(x, freqs), freqs, inverse=True), x.double())


def test_the_hadamard_transform_is_the_sylvester_matrix() -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(3, 128)
    torch.testing.assert_close(numerics.hadamard(x), x.double() @ matrix / 128**0.5)


def test_a_row_is_normalised_to_its_weight() -> None:
    x, weight = torch.randn(2, 512), torch.rand(512)
    expected = torch.nn.functional.rms_norm(x, (512,), weight, eps=1e-6)
    torch.testing.assert_close(numerics.rms_norm(x, weight, 1e-6).float(), expected)
