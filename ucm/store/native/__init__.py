# SPDX-License-Identifier: MIT
"""UCM's own stores, from a separately installed package, behind our interface."""
