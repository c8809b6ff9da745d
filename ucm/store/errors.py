# SPDX-License-Identifier: MIT
"""Every error a store raises."""


class StoreError(Exception):
    """Base of all store errors."""


class StoreConfigError(StoreError, ValueError):
    """A setting is missing, unknown, or out of range; the message names it and what is expected."""


class StoreUnavailableError(StoreError):
    """The whole store cannot be used: it is closed, or its storage refused to open."""


class BlockCorruptError(StoreError):
    """The stored bytes of one block are not what was written."""
