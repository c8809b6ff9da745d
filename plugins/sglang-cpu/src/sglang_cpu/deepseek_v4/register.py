# SPDX-License-Identifier: MIT
"""Which SGLang functions this family stands in for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_cpu import hooks
from sglang_cpu.deepseek_v4 import replacements, speculation
from sglang_cpu.deepseek_v4.backend import TorchDeepseekV4Backend, TorchDeepseekV4DraftBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sglang.srt.model_executor.model_runner import ModelRunner

_KERNELS = "sglang.kernels.ops.attention.dsv4.norm_rope"
_BACKENDS = "sglang.srt.layers.attention.deepseek_v4_trtllm_backend"
_SPECULATION = "sglang.kernels.ops.speculative"
_MODEL = "sglang.srt.models.deepseek_v4"


def install() -> None:
    """Register the family's replacements."""
    functions: dict[str, Callable[..., Any]] = {
        f"{_KERNELS}.fused_rope_inplace": replacements.fused_rope_inplace,
        f"{_KERNELS}.fused_q_norm_rope": replacements.fused_q_norm_rope,
        f"{_KERNELS}.fused_k_norm_rope_flashmla": replacements.fused_k_norm_rope_flashmla,
        f"{_KERNELS}.fused_q_indexer_rope_hadamard_quant": replacements.fused_q_indexer_rope_hadamard_quant,
        f"{_BACKENDS}.create_deepseek_v4_attn_backend": _attention_backend,
        f"{_BACKENDS}.create_deepseek_v4_multistep_backend": TorchDeepseekV4DraftBackend,
        f"{_MODEL}.DeepseekV4DecoderLayerBase.hc_pre": replacements.hc_pre,
        f"{_MODEL}.DeepseekV4DecoderLayerBase.hc_post": replacements.hc_post,
        f"{_MODEL}.DeepseekV4ForCausalLM.set_embed_and_head": replacements.set_embed_and_head,
        f"{_MODEL}.DeepseekV4Model.hc_head": replacements.hc_head,
        f"{_MODEL}_nextn.DeepseekV4ModelNextN.hc_head": replacements.hc_head,
        f"{_SPECULATION}.cache_locs.assign_draft_cache_locs_contiguous_func": (
            speculation.assign_draft_cache_locs_contiguous_func
        ),
        f"{_SPECULATION}.cache_locs.assign_extend_cache_locs_func": speculation.assign_extend_cache_locs_func,
        f"{_SPECULATION}.eagle.fill_bonus_tokens_func": speculation.fill_bonus_tokens_func,
        f"{_SPECULATION}.spec_tree.build_tree_kernel_efficient_func": speculation.build_tree_kernel_efficient_func,
        f"{_SPECULATION}.spec_tree.verify_tree_greedy_func": speculation.verify_tree_greedy_func,
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": speculation.assign_req_to_token_pool_func,
        "sglang.srt.mem_cache.allocation.get_last_loc": speculation.get_last_loc,
        "sglang.kernels.ops.kvcache.dsv4_c128_cleanup.clear_unaccepted_c128_draft_states": (
            speculation.clear_unaccepted_c128_draft_states
        ),
        "sglang.kernels.ops.gemm.bf16_fp32.linear_bf16_fp32": replacements.linear_bf16_fp32,
        "sglang.srt.platforms.interface.reject_out_of_tree_path": replacements.reject_out_of_tree_path,
    }
    for target, replacement in functions.items():
        hooks.replace(target, replacement)
    hooks.define(_MODEL, {"get_rope_wrapper": replacements.get_rope_wrapper})


def _attention_backend(model_runner: ModelRunner, **_: object) -> TorchDeepseekV4Backend:
    return TorchDeepseekV4Backend(model_runner)
