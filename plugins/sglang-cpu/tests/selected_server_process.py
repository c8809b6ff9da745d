# SPDX-License-Identifier: MIT
"""What a process of a server on this platform looks like after SGLang has loaded its plugins.

Run by `test_plugin.py` in an interpreter of its own: the replacements are for the life of a process.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.pool_host import common, mamba
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang_cpu import hooks, invariant
from sglang_cpu.gdn import causal_conv
from sglang_cpu.hicache import page_hash, transfer
from sglang_cpu.platform import CpuReferencePlatform

load_plugins()

assert isinstance(current_platform, CpuReferencePlatform)
hooks.verify()

# A module that imported the original by name before the plugins were loaded has the replacement as well.
assert gdn_backend.causal_conv1d_fn is causal_conv.causal_conv1d_fn
assert torch_native_backend.scaled_dot_product_attention is invariant.attention
assert mamba.transfer_kv_mamba_pf_lf is transfer.transfer_kv_mamba_pf_lf
assert native_hash._load_native_hash_module() is page_hash.HASHER

# None of these would work without CUDA.
common._cuda_host_register(torch.empty(1))
common._cuda_host_unregister(torch.empty(1))
tensor = torch.empty(1)
assert tensor.pin_memory() is tensor

a, b = torch.randn(40, 500).bfloat16(), torch.randn(60, 500).bfloat16()
exact = (a.double() @ b.double().T).bfloat16()
assert torch.equal(a @ b.T, exact)
assert torch.equal(torch.nn.functional.linear(a, b), exact)
assert torch.equal(torch.bmm(a[None], b.T[None])[0], exact)
