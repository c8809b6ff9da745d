# SPDX-License-Identifier: MIT
"""`scripts/check_patches.py`: what it accepts and what it finds."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.patching.errors import PatchingError
from ucm.patching.patch_file import Hunk
from ucm.patching.patch_set import PatchSet, patch_sets_directory, supported_versions
from ucm.testing.repository_script import load_script
from ucm.testing.sglang_copy import copy_patched_files, installed_patch_set

if TYPE_CHECKING:
    from ucm.patching.installation import Installation

REPOSITORY = Path(__file__).resolve().parents[2]
MEMORY = "srt/arg_groups/fields/memory.py"

check_patches = load_script("check_patches")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The files of the installed release that its patches change."""
    return copy_patched_files(tmp_path_factory.mktemp("release"))


@pytest.mark.parametrize("version", supported_versions(patch_sets_directory()))
def test_every_patch_set_is_well_formed_and_names_its_tests(version: str) -> None:
    check_patches.check_tests_exist(PatchSet.read(patch_sets_directory() / version))


def test_the_patches_for_the_installed_release_are_good(
    release: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_patches.main([release.version, "--tree", str(release.package.parent)]) == 0
    assert f"SGLang {release.version}: 5 patches, 5 files: good" in capsys.readouterr().out


def test_a_wheel_is_read_without_unpacking_it(release: Installation, tmp_path: Path) -> None:
    wheel = tmp_path / f"sglang-{release.version}-cp311-cp311-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in installed_patch_set().paths:
            archive.write(release.package / path, f"sglang/{path}")
    assert check_patches.main([release.version, "--wheel", str(wheel)]) == 0


def test_the_wheel_of_another_release_is_refused(
    release: Installation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "sglang-99.0-cp311-cp311-any.whl"
    assert check_patches.main([release.version, "--wheel", str(wheel)]) == 1
    assert f"{wheel.name} is not SGLang {release.version}" in capsys.readouterr().err


def changed_set(**changes: Any) -> PatchSet:  # noqa: ANN401 # Fields of PatchFile.
    """Return the real patch set with its first patch changed."""
    patch_set = installed_patch_set()
    return PatchSet(
        patch_set.version, (dataclasses.replace(patch_set.patches[0], **changes), *patch_set.patches[1:])
    )


def test_a_patch_that_does_not_apply_is_found(release: Installation) -> None:
    patch_set = changed_set(hunks={MEMORY: (Hunk(("never there\n",), ("x\n",), "@@ -1,1 +1,1 @@"),)})
    with pytest.raises(PatchingError, match=f"{MEMORY}: hunk @@ -1,1 .* are not there"):
        check_patches.check_release(patch_set, release.package)


def test_a_result_that_does_not_compile_is_found(release: Installation) -> None:
    line = (release.package / MEMORY).read_text().splitlines(keepends=True)[2]
    patch_set = changed_set(hunks={MEMORY: (Hunk((line,), (line, "def (:\n"), "@@ -3,1 +3,2 @@"),)})
    with pytest.raises(PatchingError, match=f"{MEMORY} does not compile when patched"):
        check_patches.check_release(patch_set, release.package)


def test_a_patch_that_cannot_be_undone_is_found(release: Installation) -> None:
    # Which of the blank lines it made cannot be told afterwards.
    patch_set = changed_set(hunks={MEMORY: (Hunk(("import json\n",), ("\n",), "@@ -5,1 +5,1 @@"),)})
    with pytest.raises(PatchingError, match=r"reversed: .* start at lines"):
        check_patches.check_release(patch_set, release.package)


def test_a_file_that_the_release_lacks_is_found(release: Installation) -> None:
    patch_set = changed_set(hunks={"srt/absent.py": (Hunk(("a\n",), ("b\n",), "@@ -1,1 +1,1 @@"),)})
    with pytest.raises(PatchingError, match=r"has no srt/absent\.py"):
        check_patches.check_release(patch_set, release.package)


@pytest.mark.parametrize(
    "test", ["tests/unit/no_such_file.py::test_it", "tests/unit/test_check_patches.py::test_no_such_test"]
)
def test_a_patch_without_its_test_is_found(test: str) -> None:
    patch_set = changed_set(header={**installed_patch_set().patches[0].header, "Test": test})
    with pytest.raises(PatchingError, match=f"there is no test {test}"):
        check_patches.check_tests_exist(patch_set)


def test_an_unknown_release_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        check_patches.main(["99.0"])
    assert leaving.value.code == 2
    assert "no patches for 99.0" in capsys.readouterr().err
