# SPDX-License-Identifier: MIT
"""The other backends, and the limits: what each needs, and how it is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.backends import FILE, OURS, backend_settings
from benchmarks.remote import REPOSITORY
from benchmarks.rival_packages import (
    install_mooncake,
    install_native,
    install_nixl,
    mooncake_master,
    python_path,
)
from benchmarks.rival_process import MEMORY, PLAIN_FILES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

SEGMENT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How to start one side.

    Attributes:
        settings: What selects the backend, see `backend_settings`; None for a limit.
        environment: Of its process, beside ours.
        helpers: Ids of processes that it needs and that count with it.
    """

    settings: tuple[str, dict[str, object]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    helpers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another backend, or a limit.

    Attributes:
        name: Shown in tables.
        prepare: Installs and starts what it needs, given where packages go and where it stores.
        is_limit: It has no keys, and nobody has to reach it.
        is_required: Ours has to be as fast: they promise files that are whole or absent, as ours does.
        stores_in_memory: It has no directory, so one measurement is enough.
        needs_disk: It reads and writes around the page cache.
    """

    name: str
    prepare: Callable[[ExitStack, Path, Path], Setup]
    is_limit: bool = False
    is_required: bool = False
    stores_in_memory: bool = False
    needs_disk: bool = False


def _ours(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack, packages
    return Setup(settings=backend_settings(OURS, directory))


def _native(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack
    registered, ours = backend_settings(OURS, directory)
    engine = {
        "ucm_connector_name": "UcmPipelineStore",
        "ucm_connector_config": {
            "store_pipeline": "Posix",
            "storage_backends": str(directory),
            "engine": "native",
            "native_package": str(install_native(packages)),
        },
    }
    extra_config = {name: value for name, value in ours.items() if name != "storage_backends"}
    extra_config["kv_connector_extra_config"] = engine
    return Setup(
        settings=(registered, extra_config), environment={"UCM_LOG_TO_FILE": "0", "UCM_LOG_LEVEL": "off"}
    )


def _file(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack, packages
    return Setup(settings=backend_settings(FILE, directory))


def _nixl(stack: ExitStack, packages: Path, directory: Path, *, direct: bool) -> Setup:
    del stack
    return Setup(
        settings=("nixl", {"plugin": {"posix": {"active": True}}, "use_direct_io": direct}),
        environment={
            "PYTHONPATH": python_path(REPOSITORY, install_nixl(packages)),
            "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(directory),
            "NIXL_LOG_LEVEL": "ERROR",
        },
    )


def _mooncake(stack: ExitStack, packages: Path, directory: Path, *, copies: bool) -> Setup:
    del directory
    package = install_mooncake(packages)
    environment = {
        "PYTHONPATH": python_path(REPOSITORY, package),
        "MC_STORE_MEMCPY": str(int(copies)),
        "GLOG_minloglevel": "2",
    }
    address, pid = stack.enter_context(mooncake_master(package, os.environ | environment))
    extra_config = {
        "master_server_address": address,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": SEGMENT_BYTES,
    }
    return Setup(settings=("mooncake", extra_config), environment=environment, helpers=(pid,))


def _limit(stack: ExitStack, packages: Path, directory: Path) -> Setup:
    del stack, packages, directory
    return Setup()


OUR_SIDE = Rival(name=OURS, prepare=_ours)
RIVALS = (
    Rival(name="native", prepare=_native, is_required=True),
    Rival(name=FILE, prepare=_file, is_required=True),
    Rival(name="nixl", prepare=partial(_nixl, direct=False)),
    Rival(name="nixl direct", prepare=partial(_nixl, direct=True), needs_disk=True),
    Rival(name="mooncake TCP", prepare=partial(_mooncake, copies=False), stores_in_memory=True),
    Rival(name="mooncake memcpy", prepare=partial(_mooncake, copies=True), stores_in_memory=True),
    Rival(name=PLAIN_FILES, prepare=_limit, is_limit=True),
    Rival(name=MEMORY, prepare=_limit, is_limit=True, stores_in_memory=True),
)
