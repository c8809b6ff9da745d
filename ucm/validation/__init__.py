# SPDX-License-Identifier: MIT
"""Drive a running SGLang server over HTTP and check what its cache restores."""
