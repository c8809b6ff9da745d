# SPDX-License-Identifier: MIT
"""What surrounds the delta rule, against transformers and plain torch."""

from __future__ import annotations

import torch
from sglang_cpu.gdn import elementwise
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated


def test_the_gated_norm_is_that_of_transformers() -> None:
    reference = Qwen3_5RMSNormGated(32)
    torch.nn.init.normal_(reference.weight)
    x, gate = torch.randn(10, 32), torch.randn(10, 32)

    ours = elementwise.gated_norm(x, reference.weight.data, None, z=gate, is_rms_norm=True)

    torch.testing.assert_close(ours, reference(x, gate).detach())


def test_the_norm_without_a_gate_centres_unless_it_is_rms() -> None:
    x, weight, bias = torch.randn(5, 16), torch.randn(16), torch.randn(16)

    ours = elementwise.gated_norm(x, weight, bias, eps=1e-5)

    torch.testing.assert_close(ours, torch.nn.functional.layer_norm(x, (16,), weight, bias, 1e-5))


def test_projections_are_split_in_the_order_q_k_v_z_and_b_a() -> None:
    heads_qk, heads_v, dim_qk, dim_v = 2, 4, 3, 5
    widths = [heads_qk * dim_qk, heads_qk * dim_qk, heads_v * dim_v, heads_v * dim_v]
    parts = [torch.full((7, width), float(number)) for number, width in enumerate(widths)]
    b, a = torch.full((7, heads_v), 8.0), torch.full((7, heads_v), 9.0)

    qkv, z, b_out, a_out = elementwise.split_projections(
        torch.cat(parts, dim=-1), torch.cat([b, a], dim=-1), heads_qk, heads_v, dim_qk, dim_v
    )

    assert torch.equal(qkv, torch.cat(parts[:3], dim=-1))
    assert torch.equal(z, parts[3].view(7, heads_v, dim_v))
    assert torch.equal(b_out, b)
    assert torch.equal(a_out, a)


def test_the_output_gate_may_be_a_view_by_head() -> None:
    output, gate = torch.randn(6, 12), torch.randn(6, 3, 8)[..., :4]
    expected = output * gate.reshape(6, 12).sigmoid()

    result = elementwise.sigmoid_mul(output, gate, inplace=True)

    torch.testing.assert_close(result, expected)
    assert result is output


def test_marked_sequences_leave_a_copy_of_their_states_in_all_layers() -> None:
    conv, ssm = torch.randn(3, 8, 4), torch.randn(3, 8, 2, 2)
    conv_before, ssm_before = conv.clone(), ssm.clone()

    elementwise.track_states(
        conv,
        ssm,
        cache_indices=torch.tensor([1, 2, 3]),
        mamba_track_mask=torch.tensor([True, False, True]),
        mamba_track_indices=torch.tensor([5, 6, 7]),
        batch_size=3,
    )

    for pool, before in ((conv, conv_before), (ssm, ssm_before)):
        expected = before.clone()
        expected[:, 5], expected[:, 7] = before[:, 1], before[:, 3]
        assert torch.equal(pool, expected)
