# SPDX-License-Identifier: MIT
"""Interleaved comparisons of this package with SGLang's own storage backends and with plain files."""
