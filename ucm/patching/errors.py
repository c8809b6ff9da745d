# SPDX-License-Identifier: MIT
"""Every error of the patch tool; each message says what to do next."""


class PatchingError(Exception):
    """Base of all errors here."""


class PatchFormatError(PatchingError):
    """A patch file or a series is not written as `patches/README.md` asks."""


class PatchConflictError(PatchingError):
    """The lines that a patch changes are not in the file, or are there more than once."""


class InstallationError(PatchingError):
    """There is no SGLang to work on, its release is not supported, or it cannot be written."""


class ForeignChangeError(PatchingError):
    """A file is neither SGLang's own nor the result of our patches."""
