# SPDX-License-Identifier: MIT
"""`ucm-sglang patch` against files and metadata of the real release."""

# ruff: noqa: S603, S607 # The commands are the tests' own.

from __future__ import annotations

import dataclasses
import json
import os
import py_compile
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.cli.main import main
from ucm.patching.installation import sha256
from ucm.patching.patch_file import Hunk
from ucm.patching.patch_set import PatchSet, patch_sets_directory
from ucm.patching.patcher import STATE_DIRECTORY, Patcher, PatchState
from ucm.testing.sglang_copy import copy_patched_files, installed_patch_set, link_package

if TYPE_CHECKING:
    from ucm.patching.installation import Installation

APPLIED, NOT_APPLIED, INCOMPLETE, IMPOSSIBLE = 0, 1, 3, 4
"""Exit status of `status`; a successful `apply` or `revert` returns 0 as well."""

MEMORY = "srt/arg_groups/fields/memory.py"


@pytest.fixture
def sglang(tmp_path: Path) -> Installation:
    """An unpatched SGLang of this test's own: the files that the patches change, and the metadata."""
    return copy_patched_files(tmp_path / "site-packages")


def patch(action: str, sglang: Installation) -> int:
    return main(["patch", action, "--sglang-dir", str(sglang.package)])


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def changed_set() -> PatchSet:
    """Return the patch set as another version of this package might have it."""

    def changed(hunk: Hunk) -> Hunk:
        return dataclasses.replace(hunk, new=tuple(line.replace("unifiedcache", "ucm") for line in hunk.new))

    original = installed_patch_set()
    return PatchSet(
        original.version,
        tuple(
            dataclasses.replace(
                patch, hunks={path: tuple(map(changed, hunks)) for path, hunks in patch.hunks.items()}
            )
            for patch in original.patches
        ),
    )


def test_apply_gives_what_git_makes_of_the_patches(sglang: Installation, tmp_path: Path) -> None:
    shutil.copytree(sglang.package, tmp_path / "git" / "sglang")
    series = (patch_sets_directory() / sglang.version / "series").read_text().split()
    patches = [str((patch_sets_directory() / sglang.version / name).resolve()) for name in series]
    # By itself it allows no fuzz.
    subprocess.run(["git", "apply", "-p2", *patches], cwd=tmp_path / "git", check=True)
    assert patch("apply", sglang) == APPLIED
    assert tree(sglang.package) == tree(tmp_path / "git" / "sglang")


def test_revert_leaves_no_trace(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    assert patch("apply", sglang) == 0
    assert tree(sglang.package) != {name.removeprefix("sglang/"): data for name, data in before.items()}
    assert patch("revert", sglang) == 0
    assert tree(sglang.package.parent) == before
    assert not (sglang.package.parent / STATE_DIRECTORY).exists()


def test_status_tells_whether_the_patches_are_applied(
    sglang: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert patch("status", sglang) == NOT_APPLIED
    patch("apply", sglang)
    assert patch("status", sglang) == APPLIED
    patch("revert", sglang)
    capsys.readouterr()
    assert patch("status", sglang) == NOT_APPLIED
    output = capsys.readouterr().out
    assert f"SGLang {sglang.version} in {sglang.package}: not patched" in output
    assert all(patch.name in output for patch in installed_patch_set().patches)


def test_status_changes_nothing(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    patch("status", sglang)
    assert tree(sglang.package.parent) == before


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_doing_it_twice_does_nothing_more(
    sglang: Installation, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    patch(action, sglang)
    after = tree(sglang.package.parent)
    capsys.readouterr()
    assert patch(action, sglang) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert tree(sglang.package.parent) == after


@pytest.mark.parametrize("patched_before", [False, True], ids=["unpatched", "patched"])
@pytest.mark.parametrize("action", ["apply", "revert", "status"])
def test_a_file_changed_by_somebody_else_stops_everything(
    sglang: Installation, action: str, patched_before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if patched_before:
        patch("apply", sglang)
    with (sglang.package / MEMORY).open("a") as file:
        file.write("# A site's own change.\n")
    before = tree(sglang.package)
    capsys.readouterr()
    assert patch(action, sglang) == IMPOSSIBLE
    output = capsys.readouterr()
    assert MEMORY in output.err + output.out
    assert "changed or removed by something else" in output.err + output.out
    if action != "status":
        assert f"pip install --force-reinstall --no-deps sglang=={sglang.version}" in output.err
    assert tree(sglang.package) == before


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe not text"], ids=["empty", "not text"])
def test_a_damaged_file_stops_everything(sglang: Installation, damage: bytes) -> None:
    (sglang.package / MEMORY).write_bytes(damage)
    assert patch("apply", sglang) == IMPOSSIBLE
    assert patch("status", sglang) == IMPOSSIBLE


def test_a_missing_file_stops_everything(sglang: Installation, capsys: pytest.CaptureFixture[str]) -> None:
    (sglang.package / MEMORY).unlink()
    assert patch("apply", sglang) == IMPOSSIBLE
    assert MEMORY in capsys.readouterr().err
    assert not (sglang.package / MEMORY).exists()


@pytest.mark.parametrize("action", ["apply", "revert", "status"])
def test_a_repackaged_release_that_differs_is_left_alone(
    sglang: Installation, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sglang.package / MEMORY
    record = sglang.package.parent / f"sglang-{sglang.version}.dist-info" / "RECORD"
    digest = sha256(file.read_bytes())
    file.write_text(file.read_text().replace('"aibrix",', '"aibrix-2",'))
    record.write_text(record.read_text().replace(digest, sha256(file.read_bytes())))
    before = tree(sglang.package.parent)
    assert patch(action, sglang) == IMPOSSIBLE
    error = capsys.readouterr().err
    assert "is not as it was released" in error
    assert "accept-unifiedcache-on-the-command-line.patch" in error
    assert tree(sglang.package.parent) == before


def test_an_unsupported_release_is_left_alone(
    sglang: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = sglang.package.parent / f"sglang-{sglang.version}.dist-info"
    text = (metadata / "METADATA").read_text().replace(f"\nVersion: {sglang.version}\n", "\nVersion: 99.0\n")
    (metadata / "METADATA").write_text(text)
    metadata.rename(metadata.with_name("sglang-99.0.dist-info"))
    before = tree(sglang.package.parent)
    assert patch("apply", sglang) == IMPOSSIBLE
    error = capsys.readouterr().err
    assert "no patches for SGLang 99.0" in error
    assert f"the nearest is {sglang.version}" in error
    assert "loads no plugins" in error  # This copy lacks srt/plugins.
    assert tree(sglang.package.parent) == before
    (sglang.package / "srt" / "plugins").mkdir()
    (sglang.package / "srt" / "plugins" / "__init__.py").touch()
    patch("status", sglang)
    assert "may work without patching" in capsys.readouterr().err


def test_environments_that_share_files_by_hard_links_stay_apart(sglang: Installation, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(sglang.package, other, copy_function=os.link)
    before = tree(other)
    patch("apply", sglang)
    assert tree(other) == before
    patch("revert", sglang)
    assert tree(other) == before


def test_a_symbolic_link_into_a_package_store_is_not_written_through(
    sglang: Installation, tmp_path: Path
) -> None:
    stored = tmp_path / "stored.py"
    (sglang.package / MEMORY).rename(stored)
    (sglang.package / MEMORY).symlink_to(stored)
    before = stored.read_bytes()
    assert patch("apply", sglang) == APPLIED
    assert stored.read_bytes() == before
    assert patch("revert", sglang) == 0
    assert (sglang.package / MEMORY).read_bytes() == before


def test_file_modes_are_kept(sglang: Installation) -> None:
    (sglang.package / MEMORY).chmod(0o640)
    patch("apply", sglang)
    assert (sglang.package / MEMORY).stat().st_mode & 0o777 == 0o640
    patch("revert", sglang)
    assert (sglang.package / MEMORY).stat().st_mode & 0o777 == 0o640


def test_no_stale_bytecode_survives(sglang: Installation) -> None:
    for action in ("apply", "revert"):
        # Python would go on using this kind without ever looking at the source.
        kind = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compiled = Path(str(py_compile.compile(str(sglang.package / MEMORY), invalidation_mode=kind)))
        assert compiled.exists()
        patch(action, sglang)
        assert not compiled.exists()


def test_files_that_were_installed_anew_are_patched_again(sglang: Installation) -> None:
    pristine = (sglang.package / MEMORY).read_bytes()
    patch("apply", sglang)
    patched = tree(sglang.package)
    (sglang.package / MEMORY).write_bytes(pristine)
    assert patch("status", sglang) == INCOMPLETE
    assert patch("apply", sglang) == 0
    assert tree(sglang.package) == patched


def test_patches_applied_by_hand_are_recognised_and_undone(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    for path in installed_patch_set().paths:
        file = sglang.package / path
        file.write_bytes(installed_patch_set().apply(path, file.read_bytes()))
    assert patch("status", sglang) == APPLIED
    assert patch("revert", sglang) == 0
    assert tree(sglang.package.parent) == before


def test_patches_of_another_version_of_this_tool_are_undone(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    Patcher(changed_set(), sglang).apply()
    assert patch("status", sglang) == INCOMPLETE
    assert patch("revert", sglang) == 0
    assert tree(sglang.package.parent) == before


def test_patches_of_another_version_of_this_tool_are_brought_up_to_date(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    Patcher(changed_set(), sglang).apply()
    assert patch("apply", sglang) == 0
    assert patch("status", sglang) == APPLIED
    assert patch("revert", sglang) == 0
    assert tree(sglang.package.parent) == before


def test_a_file_that_the_patches_no_longer_change_is_restored(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    patch("apply", sglang)
    fewer = Patcher(installed_patch_set().without("accept-unifiedcache-on-the-command-line.patch"), sglang)
    assert fewer.state() is PatchState.INCOMPLETE
    assert fewer.apply()
    assert fewer.state() is PatchState.APPLIED
    assert (sglang.package / MEMORY).read_bytes() == before[f"sglang/{MEMORY}"]
    fewer.revert()
    assert tree(sglang.package.parent) == before


def test_a_patch_that_does_not_fit_changes_nothing(sglang: Installation) -> None:
    before = tree(sglang.package.parent)
    patches = installed_patch_set().patches
    broken = dataclasses.replace(patches[-1], hunks={MEMORY: (Hunk(("absent\n",), ("x\n",), "@@ @@"),)})
    with pytest.raises(Exception, match="are not there"):
        Patcher(PatchSet(sglang.version, (*patches[:-1], broken)), sglang).apply()
    assert tree(sglang.package.parent) == before


def environment(directory: Path) -> tuple[str, Path]:
    """Make a virtual environment; return its interpreter and its site-packages."""
    venv.create(directory, with_pip=False)
    python = f"{directory}/bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    return python, Path(site_packages)


def test_a_patched_sglang_can_be_uninstalled(tmp_path: Path) -> None:
    python, site_packages = environment(tmp_path / "environment")
    sglang = link_package(site_packages)
    patch("apply", sglang)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "uninstall", "--quiet", "--yes", "sglang"],
        check=True,
    )
    assert {path.name for path in site_packages.iterdir()} <= {STATE_DIRECTORY}


def test_an_sglang_installed_anew_is_not_patched(tmp_path: Path) -> None:
    sglang = copy_patched_files(tmp_path)
    patch("apply", sglang)
    shutil.rmtree(sglang.package)
    shutil.rmtree(tmp_path / f"sglang-{sglang.version}.dist-info")
    sglang = copy_patched_files(tmp_path)
    assert patch("status", sglang) == NOT_APPLIED
    assert patch("apply", sglang) == 0
    assert patch("status", sglang) == APPLIED


def test_another_environment_is_named_by_its_interpreter(tmp_path: Path) -> None:
    python, site_packages = environment(tmp_path / "environment")
    sglang = copy_patched_files(site_packages)
    assert main(["patch", "apply", "--python", python]) == 0
    assert patch("status", sglang) == APPLIED


def test_an_editable_install_is_patched_where_its_source_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, site_packages = environment(tmp_path / "environment")
    sglang = copy_patched_files(tmp_path / "checkout" / "python")
    before = tree(sglang.package)
    metadata = site_packages / f"sglang-{sglang.version}.dist-info"
    (sglang.package.parent / metadata.name).rename(metadata)
    (metadata / "RECORD").write_text(f"{metadata.name}/METADATA,,\n")
    source = {"url": sglang.package.parent.as_uri(), "dir_info": {"editable": True}}
    (metadata / "direct_url.json").write_text(json.dumps(source))

    assert main(["patch", "status", "--python", python]) == NOT_APPLIED
    assert "recorded no digests" in capsys.readouterr().out
    assert main(["patch", "apply", "--python", python]) == 0
    assert main(["patch", "status", "--python", python]) == APPLIED
    patched = tree(sglang.package)
    assert patched[MEMORY] == installed_patch_set().apply(MEMORY, before[MEMORY])
    assert main(["patch", "revert", "--python", python]) == 0
    assert tree(sglang.package) == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--sglang-dir", "/"], "not SGLang's package directory"),
        (["--python", "/nonexistent/python"], "/nonexistent/python"),
    ],
)
def test_a_place_without_sglang_is_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patch", "status", *options]) == IMPOSSIBLE
    assert complaint in capsys.readouterr().err


def test_an_environment_without_sglang_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python, _ = environment(tmp_path / "environment")
    assert main(["patch", "status", "--python", python]) == IMPOSSIBLE
    assert "no SGLang is installed" in capsys.readouterr().err


def test_a_directory_without_metadata_is_refused(
    sglang: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(sglang.package.parent / f"sglang-{sglang.version}.dist-info")
    assert patch("status", sglang) == IMPOSSIBLE
    assert "dist-info" in capsys.readouterr().err
