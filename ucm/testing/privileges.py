# SPDX-License-Identifier: MIT
"""Let file permissions count for root too."""

from __future__ import annotations

import ctypes

_VERSION_3 = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: to read and write whatever the mode says.
_DROPPED = (1 << 1) | (1 << 2)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def obey_file_modes() -> None:
    """Drop this thread's right, and that of threads it starts later, to pass over file modes.

    There is no way back: call it in a process of its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, capabilities = _Header(_VERSION_3, 0), (_Capabilities * 2)()
    if libc.capget(ctypes.byref(header), capabilities):
        raise OSError(ctypes.get_errno(), "capget")
    capabilities[0].effective &= ~_DROPPED
    capabilities[0].permitted &= ~_DROPPED
    if libc.capset(ctypes.byref(header), capabilities):
        raise OSError(ctypes.get_errno(), "capset")
