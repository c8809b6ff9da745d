# SPDX-License-Identifier: MIT
"""Options of the end-to-end tests; pytest reads options only from a directory that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("servers", "end-to-end tests; docs/gpu.md describes a run on GPUs")
    group.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cpu: tiny models on the CPU reference platform; cuda: a real model on this machine's GPUs",
    )
    group.addoption("--sglang", metavar="RELEASE", help="serve this SGLang release, not the installed one")
    group.addoption("--model-path", type=Path, help="directory of the model to serve with --device cuda")
    group.addoption("--tp", type=int, default=1, help="GPUs to serve it on (default: %(default)s)")
    group.addoption(
        "--server-args",
        action="append",
        default=[],
        metavar="FLAGS",
        help="more flags for that server, in one word as in a shell; may be repeated, and wins over ours",
    )
    group.addoption(
        "--storage-dir",
        type=Path,
        help="where that server stores, below a new directory (default: a temporary one)",
    )
    group.addoption(
        "--logprob-tolerance",
        type=float,
        help="largest accepted difference to the uncached answer (default: 1e-5 on CPU, 0.1 on GPUs)",
    )
    group.addoption(
        "--same-tokens",
        action="store_true",
        help="demand equal tokens on GPUs too; else logprobs are compared up to the first that differs",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "any_device: serves a real model with --device cuda")
    model: Path | None = config.getoption("--model-path")
    if config.getoption("--device") == "cuda":
        if model is None or not (model / "config.json").is_file():
            raise pytest.UsageError(f"--device cuda needs --model-path <directory of a model>, got {model}")
    elif model is not None:
        raise pytest.UsageError("--model-path needs --device cuda: the CPU platform serves tiny models only")
