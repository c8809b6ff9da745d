# SPDX-License-Identifier: MIT
"""What SGLang 0.5.19 to 0.5.21 have in other places or ask for besides, told from what they have.

They serve MAMBA hybrids here, and from 0.5.20 DeepSeek V4, on one rank.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_OPS = "sglang.kernels.ops"
_NORM_ROPE = f"{_OPS}.attention.dsv4.norm_rope"
_CACHE_LOCS = f"{_OPS}.speculative.cache_locs"
_SPEC_TREE = f"{_OPS}.speculative.spec_tree"

# Modules of SGLang 0.5.23, and where their functions were.
_MOVED = {
    _NORM_ROPE: f"{_OPS}.attention.dsv4.elementwise",
    f"{_OPS}.attention.linear.fused_gdn_gating": f"{_OPS}.attention.fla.fused_gdn_gating",
    f"{_OPS}.gemm.bf16_fp32": f"{_OPS}.attention.dsv4.gemm",  # Until 0.5.20.
    f"{_OPS}.kvcache.dsv4_c128_cleanup": f"{_OPS}.attention.dsv4.c128_cleanup",
}
# Functions that were not there, or did not stand between SGLang and its kernels.
_LATER = frozenset(
    {
        "sglang.srt.platforms.interface.reject_out_of_tree_path",
        f"{_CACHE_LOCS}.assign_draft_cache_locs_contiguous_func",
        f"{_SPEC_TREE}.build_tree_kernel_efficient_func",
        f"{_SPEC_TREE}.verify_tree_greedy_func",
    }
)
ENVIRONMENT = {
    # 0.5.20 takes the output projection of DeepSeek V4 for a quantised one otherwise.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
}
"""Switches to set unless the operator has set them."""

_CONFIGURATIONS = "transformers.models.auto.configuration_auto"


def is_older() -> bool:
    """Tell whether this SGLang is one of them."""
    return not has_module(_NORM_ROPE)


def serves_deepseek_v4() -> bool:
    """Tell whether this SGLang has the functions that the DeepSeek V4 family replaces."""
    return has_module("sglang.srt.layers.attention.deepseek_v4_trtllm_backend")


def has(function: str) -> bool:
    """Tell whether this SGLang has a function of SGLang 0.5.23, there or in another module."""
    return not (is_older() and function in _LATER)


def place(function: str) -> str:
    """Return the dotted path that a function of SGLang 0.5.23 has in this SGLang."""
    module, _, name = function.rpartition(".")
    return function if has_module(module) else f"{_MOVED.get(module, module)}.{name}"


def has_module(name: str) -> bool:
    """Tell whether a module of SGLang exists, without importing even the packages above it."""
    package = find_spec("sglang")
    if package is None:
        return False
    path = Path(*name.split(".")[1:])
    roots = [Path(root) for root in package.submodule_search_locations or ()]
    return any((root / path).is_dir() or (root / path.with_suffix(".py")).is_file() for root in roots)


def accept_known_configurations() -> None:
    """Let SGLang register a model configuration that a newer transformers already has; SGLang's counts."""
    mapping = import_module(_CONFIGURATIONS)._LazyConfigMapping  # noqa: SLF001 # It has no other way in.
    register = mapping.register

    def register_again(self: Any, key: str, value: Any, exist_ok: bool = False) -> None:  # noqa: ANN401
        del exist_ok
        register(self, key, value, exist_ok=True)

    mapping.register = register_again


def answer_with_the_cpu() -> None:
    """Let torch name the CPU's streams and events, and pin no memory: SGLang asks for both in any case."""
    import torch

    if torch.cuda.is_available():
        return
    original = torch.tensor

    def tensor(data: object, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ANN401
        del pin_memory
        return original(data, **options)

    vars(torch).update(get_device_module=lambda *_: torch.cpu, tensor=tensor)


class _Launch:
    """A function in the place of a Triton kernel, which is called as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _next_power_of_2: int,
    page_size: int,
) -> None:
    """Give every new token of each request the place after the one before, or the first of a free page.

    Without enough free pages the result means nothing; SGLang counts them afterwards.
    """
    pages = iter(free_pages.tolist())
    places = []
    for prefix, end, place in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        for position in range(prefix, end):
            place = next(pages, 0) * page_size if position % page_size == 0 else place + 1
            places.append(place)
    out_indices.copy_(out_indices.new_tensor(places))


def decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    next_power_of_2: int,
    page_size: int,
) -> None:
    """Give one new token of each request its place, as `extend` does."""
    extend(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, next_power_of_2, page_size)


def paged_allocator(size: int, *, kvcache: Any, **options: Any) -> Any:  # noqa: ANN401 # SGLang has no types.
    """Build the allocator of a device pool's pages; a pool with a sliding window has one for that as well."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    if isinstance(kvcache, BaseSWAKVPool):
        return SWATokenToKVPoolAllocator(size, kvcache.swa_size, kvcache=kvcache, **options)
    return PagedTokenToKVPoolAllocator(size, kvcache=kvcache, **options)


def install() -> None:
    """Replace what these releases decide by the name of a device."""
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.mem_cache.allocator import paged

    from sglang_cpu import hooks

    vars(paged).update(alloc_extend_kernel=_Launch(extend), alloc_decode_kernel=_Launch(decode))
    hooks.replace("sglang.srt.utils.common.support_triton", lambda _: False)
    # It asserts one of five kinds of devices; the settings that it checks besides are the tiny models' own.
    vars(mamba_hook)["validate_mamba_extra_buffer"] = lambda *_, **__: None


def install_deepseek_v4() -> None:
    """Replace the kernels of speculative decoding, which later releases call by functions of their own."""
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    from sglang_cpu import hooks
    from sglang_cpu.deepseek_v4 import speculation

    hooks.replace(f"{eagle_utils.__name__}.verify_tree_greedy_func", speculation.verify_tree_greedy_func)
    vars(eagle_utils)["sgl_build_tree_kernel_efficient"] = speculation.build_tree_kernel_efficient_func
    vars(eagle_worker_common)["assign_draft_cache_locs_contiguous"] = _Launch(_assign_draft_cache_locs)


def _assign_draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    from sglang_cpu.deepseek_v4 import speculation

    del pool_len
    speculation.assign_draft_cache_locs_contiguous_func(
        req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols
    )
