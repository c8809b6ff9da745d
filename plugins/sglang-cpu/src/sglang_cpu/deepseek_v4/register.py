# SPDX-License-Identifier: MIT
"""Which SGLang functions this family stands in for: each replacement has the name of what it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs import update_config

from sglang_cpu import hooks, older_releases
from sglang_cpu.deepseek_v4 import replacements, speculation
from sglang_cpu.deepseek_v4.backend import TorchDeepseekV4Backend, TorchDeepseekV4DraftBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_KERNELS = "sglang.kernels.ops.attention.dsv4.norm_rope"
_BACKENDS = "sglang.srt.layers.attention.deepseek_v4_trtllm_backend"
_MODEL = "sglang.srt.models.deepseek_v4"
_SPECULATION = "sglang.kernels.ops.speculative"
_ALLOCATION = "sglang.srt.mem_cache.allocation"


def install() -> None:
    """Register the family's replacements."""
    for module, functions in {
        _KERNELS: (
            replacements.fused_rope_inplace,
            replacements.fused_q_norm_rope,
            replacements.fused_k_norm_rope_flashmla,
            replacements.fused_q_indexer_rope_hadamard_quant,
        ),
        f"{_MODEL}.DeepseekV4DecoderLayer": (replacements.hc_pre, replacements.hc_post),
        f"{_MODEL}.DeepseekV4Model": (replacements.hc_head,),
        f"{_MODEL}_nextn.DeepseekV4ModelNextN": (replacements.hc_head,),
        f"{_MODEL}.DeepseekV4ForCausalLM": (replacements.set_embed_and_head,),
        "sglang.kernels.ops.gemm.bf16_fp32": (replacements.linear_bf16_fp32,),
        "sglang.srt.platforms.interface": (replacements.reject_out_of_tree_path,),
        f"{_SPECULATION}.cache_locs": (
            speculation.assign_draft_cache_locs_contiguous_func,
            speculation.assign_extend_cache_locs_func,
        ),
        f"{_SPECULATION}.eagle": (speculation.fill_bonus_tokens_func,),
        f"{_SPECULATION}.spec_tree": (
            speculation.build_tree_kernel_efficient_func,
            speculation.verify_tree_greedy_func,
        ),
        _ALLOCATION: (speculation.assign_req_to_token_pool_func, speculation.get_last_loc),
        "sglang.kernels.ops.kvcache.dsv4_c128_cleanup": (speculation.clear_unaccepted_c128_draft_states,),
    }.items():
        for function in functions:
            target = f"{module}.{function.__name__}"
            if older_releases.has(target):
                hooks.replace(older_releases.place(target), function)
    hooks.replace(f"{_BACKENDS}.create_deepseek_v4_attn_backend", _attention_backend)
    hooks.replace(f"{_BACKENDS}.create_deepseek_v4_multistep_backend", TorchDeepseekV4DraftBackend)
    hooks.replace(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        replacements.keep_single_kv_head(update_config.adjust_config_with_unaligned_cpu_tp),
    )
    hooks.define(_MODEL, {"get_rope_wrapper": replacements.get_rope_wrapper})
    if older_releases.is_older():
        older_releases.install_deepseek_v4()


def _attention_backend(model_runner: ModelRunner, **_: object) -> TorchDeepseekV4Backend:
    return TorchDeepseekV4Backend(model_runner)
