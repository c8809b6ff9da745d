# SPDX-License-Identifier: MIT
"""Patch sets for SGLang releases, and applying them to an installed SGLang."""
