# SPDX-License-Identifier: MIT
"""Build one Python environment that runs SGLang on a machine without a GPU, and this repository's tests.

The official SGLang wheel is installed without its dependencies, then those of its requirements that the CPU
reference platform can use. What is left out are GPU kernels and their compilers: with them the environment
takes 11 GB, without them 6.

    python scripts/sglang_environment.py .nox/sglang-0.5.23 --sglang 0.5.23

Running it again does nothing unless something it depends on has changed; then the environment is built anew.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

OLDEST_PYTHON = (3, 11)

# Requirements of the SGLang wheel that its CPU run never imports; a half-installed torchcodec even breaks it.
_GPU_ONLY = """
    anthropic blobfile cuda-python cuda-tile datasets deepseek-recipe flash-attn-4 flashinfer-cubin
    flashinfer-python humming-kernels kernels modelscope numba nvidia-cudnn-frontend nvidia-cutlass-dsl
    nvidia-cutlass-dsl-libs-base nvidia-mathdx nvidia-ml-py nvshmem4py-cu12 nvshmem4py-cu13 openai-harmony
    py-spy quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sgl-kernel sglang-kernel smg-grpc-servicer
    tilelang timm tml-renderers torchaudio torchcodec z3-solver
"""
GPU_ONLY = frozenset(_GPU_ONLY.split())

UNDECLARED = ("dill",)
"""Imported by SGLang, which relies on `datasets` to bring it."""

LIST_REQUIREMENTS = """
import importlib.metadata as metadata, json
from packaging.requirements import Requirement
requirements = map(Requirement, metadata.requires("sglang") or [])
print(json.dumps([str(r) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""


def main() -> int:
    """Build or refresh the environment named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the environment lives")
    parser.add_argument("--sglang", required=True, metavar="VERSION", help="SGLang release to install")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        parser.error(f"SGLang needs Python 3.11 or newer, this is {found}: install nox with a newer Python")
    if importlib.util.find_spec("virtualenv") is None:
        parser.error("this Python lacks virtualenv: run it with the Python that nox is installed in")

    directory: Path = arguments.directory.resolve()
    version: str = arguments.sglang
    sglang_stamp, repository_stamp = directory / "sglang-built-from", directory / "repository-built-from"
    sglang_inputs = _fingerprint(Path(__file__), extra=f"{version} {sys.version}")
    repository_inputs = _fingerprint(
        REPOSITORY / "pyproject.toml", REPOSITORY / "plugins" / "sglang-cpu" / "pyproject.toml"
    )
    started = time.monotonic()
    if not _is_current(sglang_stamp, sglang_inputs):
        if directory.exists():
            print(f"Rebuilding {directory}: what it is built from has changed.", flush=True)
            shutil.rmtree(directory)
        _install_sglang(directory, version)
        sglang_stamp.write_text(sglang_inputs)
    if not _is_current(repository_stamp, repository_inputs):
        _install_repository(directory / "bin" / "python")
        repository_stamp.write_text(repository_inputs)
        print(f"Environment ready in {time.monotonic() - started:.0f} s: {directory}", flush=True)
    return 0


def _is_current(stamp: Path, inputs: str) -> bool:
    return stamp.is_file() and stamp.read_text() == inputs


def _install_sglang(directory: Path, version: str) -> None:
    python = directory / "bin" / "python"
    _step(1, "creating an empty environment")
    subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", str(directory)], check=True)
    _step(2, f"SGLang {version}, the official wheel")
    _install(python, "packaging")
    _install(python, "--no-deps", f"sglang=={version}")
    listed = subprocess.run([python, "-c", LIST_REQUIREMENTS], check=True, capture_output=True, text=True)
    needed = [text for text in json.loads(listed.stdout) if _name(text) not in GPU_ONLY]
    _step(3, f"PyTorch and {len(needed)} more requirements of SGLang (about 3 GB to fetch)")
    _install(python, *needed, *UNDECLARED)


def _install_repository(python: Path) -> None:
    _step(4, "this repository and what its tests need")
    groups = subprocess.run(
        [python, "-c", _READ_TEST_GROUP, str(REPOSITORY / "pyproject.toml")],
        check=True,
        capture_output=True,
        text=True,
    )
    _install(python, *json.loads(groups.stdout))
    _install(python, "--editable", str(REPOSITORY))
    _install(python, "--no-deps", "--editable", str(REPOSITORY / "plugins" / "sglang-cpu"))


_READ_TEST_GROUP = """
import json, sys, tomllib
print(json.dumps(tomllib.load(open(sys.argv[1], "rb"))["dependency-groups"]["tests"]))
"""


def _install(python: Path, *packages: str) -> None:
    # The requirements left out on purpose are no conflicts to warn of.
    quiet = ("--disable-pip-version-check", "--no-warn-conflicts", "--progress-bar", "off")
    command = [str(python), "-m", "pip", "install", *quiet]
    with subprocess.Popen([*command, *packages], stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if line.startswith(("Downloading", "  Downloading", "Installing collected")):
                print("    " + line.strip()[:100], flush=True)
    if pip.returncode != 0:
        sys.exit(f"pip could not install {' '.join(packages[:5])} ...: see the messages above")


def _fingerprint(*inputs: Path, extra: str = "") -> str:
    digest = hashlib.sha256(extra.encode())
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def _step(number: int, text: str) -> None:
    print(f"[{number}/4] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
