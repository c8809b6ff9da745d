# SPDX-License-Identifier: MIT
from __future__ import annotations

import torch
from sglang_cpu.deepseek_v4 import hyper_connection
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as reference

CONFIG = DeepseekV4Config(hidden_size=32, num_hidden_layers=1, hc_mult=4, hc_sinkhorn_iters=5)


def with_random_weights(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def test_a_block_reads_and_writes_the_streams_as_in_transformers() -> None:
    module = with_random_weights(reference.DeepseekV4HyperConnection(CONFIG))
    streams, output = torch.randn(3, 4, 32), torch.randn(3, 32)
    with torch.no_grad():
        post, blend, collapsed = (x[0] for x in module(streams[None]))
        mix = hyper_connection.mix(
            streams, module.fn, module.scale, module.base, norm_eps=1e-6, eps=CONFIG.hc_eps, iterations=5
        )
    torch.testing.assert_close(hyper_connection.collapse(streams, mix.pre), collapsed)
    written = post.unsqueeze(-1) * output.unsqueeze(-2) + blend.transpose(-1, -2) @ streams
    torch.testing.assert_close(hyper_connection.expand(output, streams, mix.post, mix.blend), written)


def test_the_last_streams_are_collapsed_as_in_transformers() -> None:
    module = with_random_weights(reference.DeepseekV4HyperHead(CONFIG))
    streams = torch.randn(3, 4, 32)
    with torch.no_grad():
        expected = module(streams[None])[0]
        head = hyper_connection.head(
            streams, module.hc_fn, module.hc_scale, module.hc_base, norm_eps=1e-6, eps=CONFIG.hc_eps
        )
    torch.testing.assert_close(head, expected)
