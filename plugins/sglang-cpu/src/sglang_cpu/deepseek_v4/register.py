# SPDX-License-Identifier: MIT
"""Which SGLang functions this family stands in for."""

from __future__ import annotations

from sglang_cpu import hooks
from sglang_cpu.deepseek_v4 import replacements
from sglang_cpu.deepseek_v4.backend import TorchDeepseekV4Backend, TorchDeepseekV4DraftBackend

_DSV4_KERNELS = "sglang.kernels.ops.attention.dsv4.norm_rope"
_BACKENDS = "sglang.srt.layers.attention.deepseek_v4_trtllm_backend"
_MODEL = "sglang.srt.models.deepseek_v4"


def install() -> None:
    """Register the family's replacements."""
    for name in (
        "fused_rope_inplace",
        "fused_q_norm_rope",
        "fused_norm_rope_inplace",
        "fused_k_norm_rope_flashmla",
        "fused_q_indexer_rope_hadamard_quant",
    ):
        hooks.replace(f"{_DSV4_KERNELS}.{name}", getattr(replacements, name))
    hooks.replace(f"{_BACKENDS}.create_deepseek_v4_attn_backend", _attention_backend)
    hooks.replace(f"{_BACKENDS}.create_deepseek_v4_multistep_backend", TorchDeepseekV4DraftBackend)
    hooks.replace("sglang.kernels.ops.gemm.bf16_fp32.linear_bf16_fp32", replacements.linear_bf16_fp32)
    hooks.replace("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", replacements.apply_linear)
    hooks.replace("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", replacements.compute_lm_head)
    hooks.replace("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", replacements.moe_forward_native)
    hooks.replace("sglang.srt.models.deepseek_v2.MoEGate.forward", replacements.gate_logits)
    hooks.replace(f"{_MODEL}._apply_wo_a_bf16_matmul", replacements.apply_wo_a)
    hooks.replace(f"{_MODEL}.DeepseekV4DecoderLayerBase.hc_pre", replacements.hc_pre)
    hooks.replace(f"{_MODEL}.DeepseekV4DecoderLayerBase.hc_post", replacements.hc_post)
    hooks.replace(f"{_MODEL}.DeepseekV4Model.hc_head", replacements.hc_head)
    hooks.replace(f"{_MODEL}_nextn.DeepseekV4ModelNextN.hc_head", replacements.hc_head)
    hooks.replace(
        "sglang.srt.platforms.interface.reject_out_of_tree_path", replacements.reject_out_of_tree_path
    )
    hooks.define(_MODEL, {"get_rope_wrapper": replacements.get_rope_wrapper})


def _attention_backend(model_runner: object, **_: object) -> TorchDeepseekV4Backend:
    return TorchDeepseekV4Backend(model_runner)
