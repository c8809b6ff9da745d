# SPDX-License-Identifier: MIT
"""The packages that other backends need, installed where they meet nobody else, and Mooncake's master."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ucm.testing import native_ucm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

NIXL_RELEASE = "1.5.1"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
MASTER_START_S = 20.0
LEASE_MS = 2000  # As long as a slow batch takes; what has been looked up is not removed before.


class RivalMissingError(Exception):
    """A backend cannot be measured here; the message says why."""


def nixl_requirements(cuda: str | None) -> list[str]:
    """Return what to install for a torch built for this CUDA release; it imports without one, too."""
    variant = "cu12" if cuda is not None and cuda.startswith("12.") else "cu13"
    return [f"nixl=={NIXL_RELEASE}", f"nixl-{variant}=={NIXL_RELEASE}"]


def install_nixl(packages: Path) -> Path:
    """Install NIXL below `packages` unless it is there; return its directory.

    Raises:
        RivalMissingError: It cannot be installed.
    """
    return _install(packages / "nixl", nixl_requirements(torch.version.cuda))


def install_mooncake(packages: Path) -> Path:
    """Install Mooncake below `packages` unless it is there; return its directory.

    Raises:
        RivalMissingError: It cannot be installed.
    """
    return _install(packages / "mooncake", [MOONCAKE])


def install_native(packages: Path) -> Path:
    """Install UCM's own package below `packages` unless it is there; return its directory.

    Raises:
        RivalMissingError: It cannot be installed, or there is none for this Python release.
    """
    try:
        native_ucm.install(packages / "native")
    except (RuntimeError, subprocess.CalledProcessError) as exc:
        raise RivalMissingError(str(exc)) from exc
    return packages / "native"


def python_path(*directories: Path) -> str:
    """Return a PYTHONPATH with these directories before those of this process."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, directories), *([inherited] if inherited else [])])


@contextmanager
def mooncake_master(package: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Run Mooncake's master on the loopback interface; give its address and process id.

    Clients tell each other where their memory is (`P2PHANDSHAKE`), so there is no metadata service.

    Raises:
        RivalMissingError: It does not start.
    """
    rpc_port, metrics_port = _free_port(), _free_port()
    binary = package / "mooncake" / "mooncake_master"
    process = subprocess.Popen(
        [
            *(str(binary), "-rpc_address", "127.0.0.1", "-rpc_port", str(rpc_port)),
            *("-metrics_host", "127.0.0.1", "-metrics_port", str(metrics_port)),
            *("-default_kv_lease_ttl", str(LEASE_MS), "-minloglevel", "2", "-logtostderr"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        _wait_for_port(process, rpc_port, binary)
        yield f"127.0.0.1:{rpc_port}", process.pid
    finally:
        process.kill()
        process.communicate()


def _install(target: Path, requirements: list[str]) -> Path:
    complete = target / f"{' '.join(requirements)}.complete"
    if complete.exists():
        return target
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
            *("--target", str(target), *requirements),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RivalMissingError(f"pip install {' '.join(requirements)}: {_last_line(done.stderr)}")
    complete.touch()
    return target


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(process: subprocess.Popen[bytes], port: int, binary: Path) -> None:
    deadline = time.monotonic() + MASTER_START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            output = process.stderr.read().decode(errors="replace") if process.stderr else ""
            reason = _last_line(output).removeprefix(f"{binary}: ")  # Results are published without paths.
            raise RivalMissingError(f"mooncake_master: {reason}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RivalMissingError(f"mooncake_master does not answer within {MASTER_START_S:.0f} s")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
