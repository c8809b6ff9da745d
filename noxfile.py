# SPDX-License-Identifier: MIT
"""Everything this repository does, one session each: `nox -l` lists them.

All sessions that need SGLang share one environment, built by `scripts/sglang_environment.py` on first use.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nox
import nox.command

if TYPE_CHECKING:
    from collections.abc import Mapping

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = True

REPOSITORY = Path(__file__).resolve().parent
SGLANG = "0.5.23"
ENVIRONMENT = REPOSITORY / ".nox" / f"sglang-{SGLANG}"
NATIVE_PACKAGE = REPOSITORY / ".nox" / "native-ucm"
RIVAL_PACKAGES = REPOSITORY / ".nox" / "rival-packages"


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Main job: restore a hybrid model's prefix from disk after a restart of the real server."""
    _run(session, "scripts/demo.py", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test that CI runs: units, patches against the released wheel, and real servers."""
    _run(
        session,
        *("-m", "pytest", *(session.posargs or ["tests", "plugins/sglang-cpu/tests", "-m", "not slow"])),
        env=_native_package(session, required=False),
    )


@nox.session(venv_backend="none", default=False)
def unit(session: nox.Session) -> None:
    """The tests that start no server: a minute or two."""
    _run(session, "-m", "pytest", "tests/unit", "plugins/sglang-cpu/tests", *session.posargs)


@nox.session(venv_backend="none", default=False)
def e2e(session: nox.Session) -> None:
    """Real servers only; words before the first option name the parts to run: `nox -s e2e -- mamba`."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), session.posargs))
    options = session.posargs[len(words) :]
    selection = ["-k", " or ".join(words)] if words else []
    arguments = ["-m", "pytest", "tests/e2e", "-m", "not slow", *selection, *options]
    if "--device cuda" in " ".join(options).replace("=", " "):
        # On GPUs it is the operator's own SGLang that counts: docs/gpu.md.
        session.run("python3", *arguments, external=True)
    else:
        _run(session, *arguments)


@nox.session(venv_backend="none", default=False)
def flash43(session: nox.Session) -> None:
    """Serve a model with all layers of DeepSeek V4 Flash, to check the sizes of its pools: some minutes."""
    _run(session, "-m", "pytest", "tests/e2e/test_deepseek_v4_flash43.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def native(session: nox.Session) -> None:
    """UCM's own PosixStore behind our interface: the contract, and a server with MAMBA state; 15 minutes."""
    _run(
        session,
        *(
            "-m",
            "pytest",
            "tests/unit/store/native",
            "tests/unit/integration/sglang/test_native_controller.py",
        ),
        *("tests/e2e/test_mamba.py", "-k", "native"),
        *session.posargs,
        env=_native_package(session, required=True),
    )


@nox.session(venv_backend="none", default=False)
def patches(session: nox.Session) -> None:
    """Check each patch set on its official wheel, then run the contract tests on that release: minutes."""
    _run(session, "scripts/check_patches.py", "--contract", *session.posargs)


@nox.session(name="release-matrix", venv_backend="none", default=False)
def release_matrix(session: nox.Session) -> None:
    """Run the contract tests on all releases, and write what they show into docs/releases.md."""
    _run(session, "scripts/check_patches.py", "--matrix", "docs/releases.md")


@nox.session(name="new-release", venv_backend="none", default=False)
def new_release(session: nox.Session) -> None:
    """Start the patch set of a new SGLang release, and report what has changed: `-- 0.5.24`."""
    _run(session, "scripts/new_release.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def serve(session: nox.Session) -> None:
    """Serve a tiny hybrid model on this machine's CPU with our backend, until interrupted."""
    _run(session, "scripts/serve.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Compare with other backends and with plain files; `-- rivals` runs one; see benchmarks/README.md."""
    plotting = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "bench")
    _run(session, "-m", "pip", "install", "--quiet", *plotting)
    _run(session, "-m", "benchmarks", "--packages", str(RIVAL_PACKAGES), *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Format, style, types, spelling and module boundaries."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "lint"))
    session.install("--no-deps", "-e", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("typos")
    session.run("mypy")
    session.run("lint-imports")


def _native_package(session: nox.Session, *, required: bool) -> dict[str, str]:
    """Install UCM's own package into a directory of its own; return the environment that names it to tests.

    Seconds, once. Where it cannot be had and is not required, its tests are skipped.
    """
    try:
        _run(session, "-m", "ucm.testing.native_ucm", str(NATIVE_PACKAGE))
    except nox.command.CommandFailed:
        if required:
            raise
        return {}
    return {"UCM_TEST_NATIVE_PACKAGE": str(NATIVE_PACKAGE)}


def _run(session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run Python with these arguments in the shared SGLang environment, building that first if needed."""
    session.run(
        sys.executable, "scripts/sglang_environment.py", str(ENVIRONMENT), "--sglang", SGLANG, external=True
    )
    binaries = str(ENVIRONMENT / "bin")
    session.run(
        f"{binaries}/python",
        *arguments,
        external=True,
        env={
            "PATH": os.pathsep.join([binaries, os.environ["PATH"]]),
            "VIRTUAL_ENV": str(ENVIRONMENT),
            **(env or {}),
        },
    )
