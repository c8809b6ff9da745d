# SPDX-License-Identifier: MIT
"""CPU reference platform for SGLang: every GPU kernel on the path of the tested models, in plain torch."""

PLATFORM_NAME = "cpu_reference"
