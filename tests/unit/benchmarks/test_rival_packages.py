# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchmarks.rival_packages import RivalMissingError, _install, mooncake_master, nixl_requirements

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("cuda", "variant"), [("12.9", "cu12"), ("13.0", "cu13"), (None, "cu13"), ("120.1", "cu13")]
)
def test_nixl_comes_in_the_variant_that_it_will_look_for(cuda: str | None, variant: str) -> None:
    names = [requirement.partition("==")[0] for requirement in nixl_requirements(cuda)]
    assert names == ["nixl", f"nixl-{variant}"]


def test_what_cannot_be_installed_is_told_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RivalMissingError, match=r"pip install \./no-such-package: \S"):
        _install(tmp_path / "packages", ["./no-such-package"])


def test_what_is_complete_is_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "no-such-package==1.complete").touch()
    assert _install(tmp_path, ["no-such-package==1"]) == tmp_path


def test_a_master_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    _master(tmp_path, 'echo first >&2; echo "$0: libibverbs.so.1: cannot open" >&2; exit 127')
    with (
        pytest.raises(RivalMissingError, match=r"^mooncake_master: libibverbs\.so\.1: cannot open"),
        mooncake_master(tmp_path, os.environ),
    ):
        pass


def test_a_master_ends_with_the_benchmark(tmp_path: Path) -> None:
    listen = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[4]))); time.sleep(60)"
    )
    _master(tmp_path, f'exec python3 -c "{listen}" "$@"')
    with mooncake_master(tmp_path, os.environ) as (address, pid):
        assert address.startswith("127.0.0.1:")
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _master(package: Path, script: str) -> None:
    binary = package / "mooncake" / "mooncake_master"
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
