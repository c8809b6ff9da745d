# SPDX-License-Identifier: MIT
"""`scripts/new_release.py`, with a release that has a set already, treated as new."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from ucm.patching.contract import contract
from ucm.patching.patch_file import PatchFile
from ucm.patching.patch_set import PatchSet, patch_sets_directory, supported_versions
from ucm.testing.repository_script import load_script
from ucm.testing.sglang_release import release_wheel

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = REPOSITORY / "contracts" / "sglang"

new_release = load_script("new_release")


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the patch sets and of the contracts, to write in."""
    sets, contracts = tmp_path / "sets", tmp_path / "contracts"
    shutil.copytree(patch_sets_directory(), sets)
    shutil.copytree(CONTRACTS, contracts)
    return sets, contracts


def run(version: str, copies: tuple[Path, Path], *options: str) -> int:
    sets, contracts = copies
    status: int = new_release.main([version, "--sets", str(sets), "--contracts", str(contracts), *options])
    return status


def test_a_release_like_its_neighbour_gets_the_same_series(
    copies: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sets, contracts = copies
    shutil.rmtree(sets / "0.5.22")
    (contracts / "0.5.22.md").unlink()

    assert run("0.5.22", copies, "--no-tests") == 0

    assert (sets / "0.5.22" / "series").read_text() == (
        patch_sets_directory() / "0.5.22" / "series"
    ).read_text()
    assert (contracts / "0.5.22.md").read_text() == (CONTRACTS / "0.5.22.md").read_text()
    assert "on_host_pools_registered(self)" in capsys.readouterr().out


def test_a_patch_that_no_longer_applies_is_left_to_a_human(
    copies: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sets, _ = copies
    for version in ("0.5.19", "0.5.18"):
        shutil.rmtree(sets / version)
    # Its neighbour is 0.5.20, whose arguments lie in other files.
    for version in ("0.5.20", "0.5.21", "0.5.22", "0.5.23"):
        series = sets / version / "series"
        series.write_text(
            "".join(line for line in series.read_text().splitlines(keepends=True) if "/0.5.1" not in line)
        )

    assert run("0.5.19", copies, "--no-tests") == 1

    out = capsys.readouterr().out
    assert (
        "DOES NOT APPLY  accept-unifiedcache-on-the-command-line.patch: SGLang 0.5.19 has no srt/arg_groups"
        in out
    )
    assert "accept-unifiedcache" not in (sets / "0.5.19" / "series").read_text()


def test_a_patch_that_does_not_apply_is_not_needed_where_its_test_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SGLang 0.5.22 does itself what this patch is for."""
    patch = PatchFile.read(patch_sets_directory() / "0.5.16" / "survive-a-failing-lookup.patch")

    assert not new_release.still_needed(PatchSet.read(patch_sets_directory() / "0.5.22"), patch)

    assert "NOT NEEDED      survive-a-failing-lookup.patch" in capsys.readouterr().out


def test_a_release_that_has_a_set_is_left_alone(copies: tuple[Path, Path]) -> None:
    with pytest.raises(SystemExit):
        run("0.5.22", copies)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])  # The others: `nox -s patches`.
def test_the_committed_contract_is_what_the_release_says(version: str) -> None:
    package = zipfile.Path(release_wheel(version), "sglang/")

    assert (CONTRACTS / f"{version}.md").read_text(encoding="utf-8") == contract(version, package)


@pytest.mark.parametrize("version", supported_versions(patch_sets_directory()))
def test_every_release_has_a_contract(version: str) -> None:
    assert (CONTRACTS / f"{version}.md").is_file()
