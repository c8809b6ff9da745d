# SPDX-License-Identifier: MIT
"""Matrix products and attention whose results do not depend on what else is in the batch.

torch's CPU kernels choose their blocking, and so their order of summation, by shape. The same token then gets
other low bits in another batch or another chunk of a prefill, and an error of the cache drowns in that noise.
Summing in fp64 and rounding once makes the order invisible: it moves the sum by about 1e-16, and the rounding
to bf16 or fp32 swallows that.
"""

from __future__ import annotations

import torch

_QUERY_BLOCK = 256

_library: torch.library.Library | None = None


def install() -> None:
    """Replace torch's matrix products on CPU tensors in this process, and SGLang's torch attention."""
    global _library  # torch drops the registrations together with the object.
    from sglang_cpu import hooks

    _library = torch.library.Library("aten", "IMPL")
    _library.impl("mm", mm, "CPU")
    _library.impl("bmm", bmm, "CPU")
    _library.impl("addmm", addmm, "CPU")
    hooks.define(
        "sglang.srt.layers.attention.torch_native_backend", {"scaled_dot_product_attention": attention}
    )


# The out variants are kernels of their own, which the registrations above leave alone.


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Stand in for `aten::mm`."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=_sum_type(a))
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out).to(a.dtype)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Stand in for `aten::bmm`."""
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=_sum_type(a))
    return torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out).to(a.dtype)


def addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Stand in for `aten::addmm`."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=_sum_type(a))
    bias, a_wide, b_wide = (x.to(out.dtype) for x in (bias, a, b))
    return torch.addmm(bias, a_wide, b_wide, beta=beta, alpha=alpha, out=out).to(a.dtype)


def _sum_type(a: torch.Tensor) -> torch.dtype:
    return torch.float64 if a.dtype.is_floating_point else a.dtype


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for `torch.nn.functional.scaled_dot_product_attention`, computed in fp64.

    Takes `[1, heads, tokens, dim]` and a boolean mask `[queries, keys]`. Queries go in blocks, so that memory
    grows with the length of a prompt, not with its square.
    """
    if dropout_p:
        raise NotImplementedError("the CPU reference does not train")
    queries, keys = query.shape[-2], key.shape[-2]
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    key, value = key.double().transpose(-1, -2), value.double()
    output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    for start in range(0, queries, _QUERY_BLOCK):
        block = slice(start, min(start + _QUERY_BLOCK, queries))
        scores = query[..., block, :].double() @ key * (scale or query.shape[-1] ** -0.5)
        allowed = None if attn_mask is None else attn_mask[block]
        if is_causal:
            allowed = torch.arange(keys) <= torch.arange(block.start, block.stop)[:, None]
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        output[..., block, :] = scores.softmax(-1) @ value
    return output
