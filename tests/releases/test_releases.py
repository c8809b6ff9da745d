# SPDX-License-Identifier: MIT
"""Every patch set on its official release, and the contract tests on a few (`nox -s patches`: on all)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.patching.patch_set import patch_sets_directory, supported_versions
from ucm.testing.repository_script import load_script
from ucm.testing.sglang_release import CONTRACT, run_contract_tests, unpack_patched_release

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = supported_versions(patch_sets_directory())

# One for each protocol of SGLang's storage threads: host pages before the lookup, after it, and acknowledged.
CONTRACT_VERSIONS = ["0.5.10.post1", "0.5.18", "0.5.21"]

check_patches = load_script("check_patches")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_patches_apply_compile_and_reverse_on_the_official_release(
    version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_patches.main([version]) == 0
    assert f"SGLang {version}: " in capsys.readouterr().out


@pytest.mark.parametrize("version", CONTRACT_VERSIONS)
def test_the_contract_holds_on_the_patched_release(version: str) -> None:
    check_patches.check_contract(version)


@pytest.mark.parametrize("version", CONTRACT_VERSIONS)
def test_a_storage_thread_dies_of_an_exception_without_the_patch(version: str, tmp_path: Path) -> None:
    installation = unpack_patched_release(version, tmp_path, without="survive-a-failing-backup.patch")

    result = run_contract_tests(
        installation, [f"{CONTRACT}/test_storage_threads.py::test_a_backup_that_raises_is_acknowledged"]
    )

    assert result.returncode == 1
    assert "TimeoutError" in result.stdout
