# SPDX-License-Identifier: MIT
"""Find an installed SGLang, and what its installer recorded about its files, without importing it."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.patching.errors import InstallationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Installation:
    """One installed SGLang.

    Attributes:
        version: Release, as its metadata has it.
        package: Directory of the `sglang` package.
        recorded: SHA-256 of its files as installed, by path below `package`; empty for an editable
            install, whose installer records none.
    """

    version: str
    package: Path
    recorded: Mapping[str, str]

    @property
    def has_plugin_system(self) -> bool:
        """Whether this SGLang loads plugins (0.5.11 and later do)."""
        return (self.package / "srt" / "plugins" / "__init__.py").is_file()


def sha256(data: bytes) -> str:
    """Return the digest in the form that `RECORD` uses."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")


def find_by_search_path(search_path: Sequence[str] | None = None) -> Installation:
    """Find SGLang as `import sglang` would; `None` is this interpreter's own search path.

    Raises:
        InstallationError: There is none.
    """
    path = sys.path if search_path is None else list(search_path)
    found = list(metadata.distributions(name="sglang", path=path))
    if not found:
        raise InstallationError(
            "no SGLang is installed here; name its environment with --python or --sglang-dir"
        )
    package = _package_directory(found[0])
    if not package.is_dir():
        raise InstallationError(f"SGLang {found[0].version} has no package directory at {package}")
    return _installation(found[0], package)


def find_by_interpreter(python: str) -> Installation:
    """Find the SGLang that the interpreter `python` would import.

    Raises:
        InstallationError: The interpreter does not run, or has no SGLang.
    """
    try:
        answer = subprocess.run(  # noqa: S603 # The operator names the interpreter.
            [python, "-c", "import json, sys; print(json.dumps([path for path in sys.path if path]))"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallationError(f"--python {python}: {error}") from error
    # The last line: start-up files of an environment may print as well.
    return find_by_search_path(json.loads(answer.stdout.splitlines()[-1]))


def find_by_directory(package: Path) -> Installation:
    """Find the SGLang whose package directory is `package`.

    Raises:
        InstallationError: There is none, or no metadata beside it that tells its release.
    """
    if not (package / "srt").is_dir():
        raise InstallationError(f"--sglang-dir {package}: not SGLang's package directory (it has no srt/)")
    found = list(metadata.distributions(name="sglang", path=[str(package.parent)]))
    if not found:
        raise InstallationError(f"--sglang-dir {package}: no sglang-*.dist-info beside it tells its release")
    return _installation(found[0], package)


def _package_directory(distribution: metadata.Distribution) -> Path:
    if source := distribution.read_text("direct_url.json"):
        location = json.loads(source)
        if location.get("dir_info", {}).get("editable"):
            url = urllib.parse.urlparse(location["url"])
            return Path(urllib.request.url2pathname(url.path)) / "sglang"
    return Path(str(distribution.locate_file("sglang")))


def _installation(distribution: metadata.Distribution, package: Path) -> Installation:
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    recorded = {
        path.removeprefix("sglang/"): digest.removeprefix("sha256=")
        for path, digest, _size in rows
        if path.startswith("sglang/") and digest.startswith("sha256=")
    }
    # Resolved, so that what is written beside the package is on its file system.
    return Installation(distribution.version, package.resolve(), recorded)
