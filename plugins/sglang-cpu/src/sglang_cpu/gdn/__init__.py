# SPDX-License-Identifier: MIT
"""Gated delta networks: the linear attention of Qwen3.5 and Qwen3-Next."""

from sglang_cpu.families import ModelFamily


def _install() -> None:
    from sglang_cpu.gdn import replacements

    replacements.install()


FAMILY = ModelFamily(name="gdn", install=_install)
