# SPDX-License-Identifier: MIT
"""Functions with the signatures of SGLang 0.5.23, each in the place of one that launches a GPU kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_cpu.deepseek_v4 import codecs, hyper_connection, indexer, numerics

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.deepseek_v4 import DeepseekV4DecoderLayerBase, DeepseekV4Model
    from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN, DeepseekV4ModelNextN
    from sglang.srt.platforms.interface import SRTPlatform


def fused_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
) -> None:
    """Rotate `[tokens, heads, rope_dim]` tensors in place."""
    for x in (q, k):
        if x is not None:
            x.copy_(numerics.rotate(x, freqs_cis[positions], inverse=inverse))


def fused_q_norm_rope(
    q_input: torch.Tensor,
    q_output: torch.Tensor,
    eps: float | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Normalise each head, unless `eps` is None, and rotate its tail."""
    q = q_input if eps is None else numerics.rms_norm(q_input, None, eps)
    q_output.copy_(numerics.rotate_tail(q, freqs_cis[positions]))


def fused_k_norm_rope_flashmla(
    kv: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    kvcache: torch.Tensor,
    page_size: int,
    **_: object,
) -> None:
    """Normalise and rotate rows and store them in KV pages."""
    rows = numerics.rotate_tail(numerics.rms_norm(kv, kv_weight, eps), freqs_cis[positions])
    codecs.store_kv(kvcache, out_loc, rows, page_size)


def fused_q_indexer_rope_hadamard_quant(
    q_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare the indexer's queries and head weights."""
    return indexer.quantize_query(q_input, weight, weight_scale, freqs_cis[positions])


def linear_bf16_fp32(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Project `x` by the weight `y` into float32."""
    return (x.double() @ y.double().T).float()


def hc_pre(
    layer: DeepseekV4DecoderLayerBase,
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm: object = None,
    forward_batch: object = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Return a block's input, how to write back, and that the input is not normalised yet."""
    del norm, forward_batch
    mix = hyper_connection.mix(
        x,
        hc_fn,
        hc_scale,
        hc_base,
        norm_eps=layer.rms_norm_eps,
        eps=layer.hc_eps,
        iterations=layer.hc_sinkhorn_iters,
    )
    return hyper_connection.collapse(x, mix.pre), mix.post, mix.blend, False


def hc_post(
    layer: DeepseekV4DecoderLayerBase,
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
) -> torch.Tensor:
    """Write a block's output back to the streams."""
    del layer
    return hyper_connection.expand(x, residual, post, comb)


def hc_head(
    model: DeepseekV4Model | DeepseekV4ModelNextN,
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
) -> torch.Tensor:
    """Collapse the streams after the last layer."""
    return hyper_connection.head(x, hc_fn, hc_scale, hc_base, norm_eps=model.rms_norm_eps, eps=model.hc_eps)


def set_embed_and_head(
    model: DeepseekV4ForCausalLMNextN, embed: torch.nn.Parameter, head: torch.nn.Parameter
) -> None:
    """Let the draft model use the target's embedding and head; SGLang's own waits for a GPU afterwards."""
    model.model.embed_tokens.weight = embed
    model.lm_head.weight = head


def keep_single_kv_head(
    adjust: Callable[[ModelConfig, LoadConfig, int], ModelConfig],
) -> Callable[[ModelConfig, LoadConfig, int], ModelConfig]:
    """Return a function that adjusts a model configuration to CPU ranks, but leaves this family's alone.

    All ranks share V4's one KV head; `adjust` would give each rank a head of its own.
    """

    def adjust_config_with_unaligned_cpu_tp(
        model_config: ModelConfig, load_config: LoadConfig, tp_size: int
    ) -> ModelConfig:
        if model_config.hf_config.model_type == "deepseek_v4":
            return model_config
        return adjust(model_config, load_config, tp_size)

    return adjust_config_with_unaligned_cpu_tp


def get_rope_wrapper(**_: object) -> None:
    """Return None: the layers rotate with their frequency tables and never call this object."""


def reject_out_of_tree_path(platform: SRTPlatform, *, subsystem: str) -> None:
    """Let an out-of-tree platform reach the DeepSeek V4 pool, which does run on any torch device.

    Raises:
        NotImplementedError: Another path without a platform seam was reached.
    """
    if platform.is_out_of_tree() and subsystem != "the DeepSeek-V4 KV pool":
        message = f"{type(platform).__name__} cannot serve {subsystem}"
        raise NotImplementedError(message)
