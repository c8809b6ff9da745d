# SPDX-License-Identifier: MIT
"""What lets one environment, made for the newest SGLang, import the packages of all supported releases.

Only SGLang itself is of the release that is tested: it comes first on the path. What it stands on is newer
than it expects, and there is no GPU. So, before anything of SGLang is imported, `prepare` provides:

- `sgl_kernel.kvcacheio`, GPU kernels that memory pools import until 0.5.12: the CPU platform's copies;
- streams and events: torch's own for the CPU;
- transformers' registry, which by now has some names that older releases register: the later one counts;
- names of pages: the CPU platform's hasher, in place of one that SGLang compiles first (from 0.5.15);
- the available host memory, of which older releases want to keep 10 GB: more than small machines have.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType, SimpleNamespace

import psutil
from sglang_cpu import older_releases
from sglang_cpu.hicache import page_hash, transfer

_PLENTY_BYTES = 1 << 40
# Copies to and from a layout of pages by attention head, which no CPU platform has.
_NOT_HERE = (
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_per_layer_ph_lf",
    "transfer_kv_all_layer_direct_lf_ph",
)


def prepare() -> None:
    """Make this process ready to import the SGLang that is first on its path."""
    older_releases.accept_known_configurations()
    older_releases.answer_with_the_cpu()
    psutil.virtual_memory = lambda: SimpleNamespace(available=_PLENTY_BYTES, total=_PLENTY_BYTES)
    try:
        importlib.import_module("sglang.srt.mem_cache.memory_pool_host")
    except ModuleNotFoundError as error:
        if error.name != "sgl_kernel":
            raise
        _stand_in_for_sgl_kernel()
    with contextlib.suppress(ModuleNotFoundError):
        native_hash = importlib.import_module("sglang.srt.mem_cache.cpp_utils.native_hash")
        vars(native_hash)["_load_native_hash_module"] = page_hash.load


def _stand_in_for_sgl_kernel() -> None:
    def not_here(*_: object, **__: object) -> None:
        raise NotImplementedError("a GPU kernel")

    package, copies = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.kvcacheio")
    vars(copies).update(dict.fromkeys(_NOT_HERE, not_here), **transfer.FUNCTIONS)
    sys.modules.update({"sgl_kernel": package, "sgl_kernel.kvcacheio": copies})
