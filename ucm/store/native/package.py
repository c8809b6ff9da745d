# SPDX-License-Identifier: MIT
"""Import UCM's own package beside ours: both are named `ucm`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from ucm.store.errors import StoreConfigError

FACTORY_MODULE = "ucm.store.factory_v1"

# Packages that both have; ours comes first, and theirs supplies the modules that ours lacks.
_SHARED_PACKAGES = ("ucm", "ucm.store", "ucm.integration")
# Read when UCM's logging is first imported. Files and stdout are the server's; errors stay visible.
_QUIET = {"UCM_LOG_TO_FILE": "0", "UCM_LOG_LEVEL": "error"}

_lock = threading.Lock()


def connector_factory(package: str | None) -> Any:  # noqa: ANN401 -- another project's class.
    """Import UCM's package and return its factory of stores.

    Args:
        package: Directory it is installed in; None if Python finds it anyway.

    Raises:
        StoreConfigError: It cannot be imported; says how to install it.
    """
    with _lock:
        if package is not None:
            _add_to_path(package)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        logging_before = _logging_state()
        try:
            return importlib.import_module(FACTORY_MODULE).UcmConnectorFactoryV1
        except (ImportError, AttributeError, OSError) as exc:
            raise StoreConfigError(
                f"engine 'native' needs UCM's own package, which cannot be imported ({exc}); install it "
                "into a directory of its own, since it is named `ucm` as well "
                "(pip install --target DIR <UCM's wheel> wrapt), and set option 'native_package' to DIR"
            ) from exc
        finally:
            _restore_logging(*logging_before)


def _add_to_path(directory: str) -> None:
    if not Path(directory, "ucm", "store").is_dir():
        raise StoreConfigError(
            f"option 'native_package' is {directory!r}; expected the directory that UCM's wheel was "
            "installed in with pip install --target"
        )
    if directory not in sys.path:
        sys.path.append(directory)  # What the wheel imports besides.
    for name in _SHARED_PACKAGES:
        path = importlib.import_module(name).__path__
        theirs = str(Path(directory, *name.split(".")))
        if theirs not in path:
            path.append(theirs)


def _logging_state() -> tuple[int, bool, list[logging.Handler]]:
    ours = logging.getLogger("ucm")
    return ours.level, ours.propagate, list(ours.handlers)


def _restore_logging(level: int, propagate: bool, handlers: list[logging.Handler]) -> None:
    """Undo what UCM's logging does to the logger that is the parent of all of ours."""
    ours = logging.getLogger("ucm")
    ours.setLevel(level)
    ours.propagate = propagate
    ours.handlers[:] = handlers
