# SPDX-License-Identifier: MIT
"""DeepSeek V4: sliding-window, compressed and indexed attention over the real pools and page formats.

Every reduction runs in double precision and is rounded once, so a token's result does not depend on the
batch it was computed in: a cold prompt, a chunked one and one restored from the cache give the same
log-probabilities.
"""

from sglang_cpu.families import ModelFamily


def _install() -> None:
    from sglang_cpu.deepseek_v4 import register

    register.install()


FAMILY = ModelFamily(
    name="deepseek_v4",
    install=_install,
    environment={
        # The router's table look-up would be a GPU kernel.
        "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
        # SGLang compiles its hyper-connection kernels at load otherwise.
        "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    },
)
