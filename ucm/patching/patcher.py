# SPDX-License-Identifier: MIT
"""Apply a patch set to an installed SGLang, or undo it: everything or nothing, whatever happens on the way.

The state of an installation is read from its files alone: each holds SGLang's own bytes, the patched ones, or
somebody else's. A file changes by one rename, so a process that dies in the middle leaves some files patched
and some not, every one of them recognisable, and applying or reverting again completes the work.

Beside the package, a directory keeps the original bytes and the digests of what was written:

    <site-packages>/.ucm-sglang-patch/lock
                                      manifest.json   the release, and the digest of every patched file
                                      original/       the files as they were
                                      new/, old/      only while files are being replaced

It is needed once a later version of this package brings a changed patch set, whose reversal no longer undoes
what is installed. It lies outside the package, under a name that is no distribution's, so that uninstalling
SGLang works as ever.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.patching.errors import ForeignChangeError, InstallationError, PatchConflictError
from ucm.patching.installation import Installation, sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ucm.patching.patch_set import PatchSet

STATE_DIRECTORY = ".ucm-sglang-patch"


class FileState(enum.Enum):
    """Whose bytes a file holds."""

    PRISTINE = "not patched"
    PATCHED = "patched"
    OUTDATED = "patched by another version of this tool"
    FOREIGN = "changed or removed by something else"


class PatchState(enum.Enum):
    """What the states of all files amount to."""

    NOT_APPLIED = "not patched"
    APPLIED = "patched"
    INCOMPLETE = "partly patched, or by another version of this tool"
    FOREIGN = "changed or removed by something else"


@dataclass(frozen=True, slots=True)
class File:
    """One file of SGLang: what it holds, and what it holds without and with the patches.

    A foreign file has its current bytes in all three places: what they come from is unknown.
    """

    path: str  # Below the `sglang` package.
    state: FileState
    current: bytes
    pristine: bytes
    patched: bytes


class Patcher:
    """A patch set and an installed SGLang of its release."""

    def __init__(self, patch_set: PatchSet, installation: Installation) -> None:
        if patch_set.version != installation.version:
            raise ValueError(f"patches for SGLang {patch_set.version} do not fit {installation.version}")
        self._patches = patch_set
        self._installation = installation
        self._directory = installation.package.parent / STATE_DIRECTORY

    def files(self) -> list[File]:
        """Return every file that the set changes, or that an earlier version of it has changed.

        Raises:
            PatchConflictError: A patch does not fit SGLang's own bytes.
        """
        manifest = self._manifest()
        files = [self._file(path, manifest.get(path)) for path in sorted({*self._patches.paths, *manifest})]
        return [
            file for file in files if file.path in self._patches.paths or file.state is not FileState.PRISTINE
        ]

    def state(self) -> PatchState:
        """Return the state of the installation, which another process may be changing."""
        states = {file.state for file in self.files()}
        if FileState.FOREIGN in states:
            return PatchState.FOREIGN
        if states <= {FileState.PATCHED}:
            return PatchState.APPLIED
        return PatchState.NOT_APPLIED if states == {FileState.PRISTINE} else PatchState.INCOMPLETE

    def apply(self) -> bool:
        """Patch the installation; False if there was nothing to do.

        Waits while another process is at work on it.

        Raises:
            ForeignChangeError: A file was changed by something else; nothing was touched.
            PatchConflictError: A patch does not fit; nothing was touched.
            InstallationError: It cannot be written; no change was left behind.
        """
        with self._locked():
            files = self._own_files()
            if all(file.current == file.patched for file in files):
                return False
            if any(file.state is FileState.OUTDATED for file in files):
                # The manifest that describes these files makes way for a new one, so they go first.
                self._replace({file.path: file.pristine for file in files})
            self._keep_originals(files)
            self._replace({file.path: file.patched for file in files})
        return True

    def revert(self) -> bool:
        """Give every file its original bytes back; False if there was nothing to do.

        Waits while another process is at work on it.

        Raises:
            ForeignChangeError: A file was changed by something else; nothing was touched.
            InstallationError: It cannot be written; no change was left behind.
        """
        with self._locked():
            files = self._own_files()
            self._replace({file.path: file.pristine for file in files})
            self._manifest_path.unlink(missing_ok=True)
        return any(file.current != file.pristine for file in files)

    @property
    def _manifest_path(self) -> Path:
        return self._directory / "manifest.json"

    def _original(self, path: str) -> Path:
        return self._directory / "original" / path

    def _target(self, path: str) -> Path:
        return self._installation.package / path

    def _manifest(self) -> Mapping[str, str]:
        """Return the digests of the files that were patched, by path."""
        with contextlib.suppress(FileNotFoundError):
            manifest = json.loads(self._manifest_path.read_text(encoding="utf-8"))
            if manifest["sglang"] == self._installation.version:
                patched: Mapping[str, str] = manifest["patched"]
                return patched
        return {}

    def _file(self, path: str, patched_digest: str | None) -> File:
        try:
            current = self._target(path).read_bytes()
        except FileNotFoundError:
            current = b""
        pristine = self._pristine(path, current, patched_digest)
        if pristine is None:
            return File(path, FileState.FOREIGN, current, current, current)
        try:
            patched = self._patches.apply(path, pristine)
        except PatchConflictError as error:
            raise PatchConflictError(
                f"SGLang {self._installation.version} in {self._installation.package} is not as it was "
                f"released, so nothing was touched: {error}"
            ) from error
        if current == pristine:
            state = FileState.PRISTINE
        else:
            state = FileState.PATCHED if current == patched else FileState.OUTDATED
        return File(path, state, current, pristine, patched)

    def _pristine(self, path: str, current: bytes, patched_digest: str | None) -> bytes | None:
        """Return SGLang's own bytes for a file that is its own or ours, None for a foreign one."""
        recorded = self._installation.recorded.get(path)
        if sha256(current) == recorded:
            return current
        candidates = []
        if sha256(current) == patched_digest:
            with contextlib.suppress(FileNotFoundError):
                candidates.append(self._original(path).read_bytes())
        with contextlib.suppress(PatchConflictError, UnicodeDecodeError):
            candidates.append(self._patches.revert(path, current))
        if recorded is None:
            # Nobody recorded the bytes: a file is SGLang's own if the patches fit it exactly.
            with contextlib.suppress(PatchConflictError, UnicodeDecodeError):
                self._patches.apply(path, current)
                candidates.append(current)
        return next((data for data in candidates if recorded in (None, sha256(data))), None)

    def _own_files(self) -> list[File]:
        files = self.files()
        if foreign := [file.path for file in files if file.state is FileState.FOREIGN]:
            version = self._installation.version
            raise ForeignChangeError(
                f"changed or removed by something else, so nothing was touched: {', '.join(foreign)} in "
                f"{self._installation.package}. Undo that change, or install SGLang anew "
                f"(pip install --force-reinstall --no-deps sglang=={version}), and try again"
            )
        return files

    def _keep_originals(self, files: list[File]) -> None:
        for file in files:
            _write(self._original(file.path), file.pristine)
        manifest = {
            "sglang": self._installation.version,
            "patched": {file.path: sha256(file.patched) for file in files},
        }
        _write(self._manifest_path, json.dumps(manifest, indent=1).encode("utf-8"))

    def _replace(self, contents: Mapping[str, bytes]) -> None:
        """Replace the files that differ: all of them, or none if an error comes up.

        Each gets a new inode, because installers share inodes between environments.
        """
        changes = {path: data for path, data in contents.items() if self._target(path).read_bytes() != data}
        new, old = self._directory / "new", self._directory / "old"
        for path, data in changes.items():
            _write(new / path, data)
            shutil.copymode(self._target(path), new / path)
            (old / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._target(path), old / path)
            _remove_bytecode(self._target(path))
        try:
            for path in changes:
                (new / path).replace(self._target(path))
        except BaseException:
            for path in changes:
                (old / path).replace(self._target(path))
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes out, and leave nothing behind but a manifest with its originals."""
        try:
            lock = self._open_lock()
            try:
                self._remove_staged()
                yield
            finally:
                self._remove_staged()
                if not self._manifest_path.exists():
                    self._remove_directory()
                os.close(lock)
        except OSError as error:
            raise InstallationError(
                f"cannot change SGLang in {self._installation.package}: {error}. `ucm-sglang patch status` "
                f"tells whether it is as it was. Run this as a user who may write there, or use the backend "
                f"without patching (docs/configuration.md)"
            ) from error

    def _open_lock(self) -> int:
        path = self._directory / "lock"
        while True:
            # Whoever held the lock may just have removed the file, or the directory with it. `exist_ok` would
            # look whether what exists is a directory, and fail if it has gone by then.
            with contextlib.suppress(FileExistsError):
                self._directory.mkdir()
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_open_as(lock, path):
                    return lock
                os.close(lock)

    def _remove_staged(self) -> None:
        for name in ("new", "old"):
            shutil.rmtree(self._directory / name, ignore_errors=True)

    def _remove_directory(self) -> None:
        for path in self._directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        # The lock goes last: from then on another process may own the directory.
        (self._directory / "lock").unlink()
        with contextlib.suppress(OSError):
            self._directory.rmdir()


def _write(path: Path, data: bytes) -> None:
    """Write a file that is complete on disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _remove_bytecode(source: Path) -> None:
    """Remove compiled forms of a module, some of which Python would use without looking at the source."""
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
