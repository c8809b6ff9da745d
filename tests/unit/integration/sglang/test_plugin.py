# SPDX-License-Identifier: MIT
"""The plugin's hooks where something goes wrong, and what loading it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ucm.integration.sglang import plugin

if TYPE_CHECKING:
    from collections.abc import Callable


def test_sglang_finds_the_plugin() -> None:
    (entry_point,) = metadata.entry_points(group="sglang.srt.plugins", name="ucm")
    assert entry_point.load() is plugin.register


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        (plugin.accept_on_the_command_line, (None, object())),
        (plugin.switch_to_page_first, (None, object())),
        (plugin.use_zero_copy_page_functions, (None, object())),
        (plugin.write_draft_pools_on_every_rank, (False, object(), object())),
    ],
)
def test_a_hook_that_fails_leaves_sglang_its_own_result(
    hook: Callable[..., Any], arguments: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert hook(*arguments) is None
    assert f"{hook.__name__} failed; SGLang goes on without it" in caplog.text


def test_an_error_of_our_store_reaches_whoever_attaches_it() -> None:
    def refuse(_config: object, _pool: object) -> None:
        raise ValueError("storage_backends is required")

    with pytest.raises(ValueError, match="storage_backends is required"):
        plugin.construct(lambda *_: None, None, plugin.BACKEND, refuse, None, None)  # type: ignore[arg-type]


def test_other_backends_are_constructed_by_sglang() -> None:
    def original(*arguments: object) -> tuple[object, ...]:
        return arguments

    arguments = (object(), "file", object(), object(), object())
    assert plugin.construct(original, *arguments) == arguments  # type: ignore[arg-type]


def test_other_backends_keep_their_page_functions() -> None:
    controller = SimpleNamespace(storage_backend_type="file", page_get_func="theirs")
    plugin.use_zero_copy_page_functions(None, controller)
    assert controller == SimpleNamespace(storage_backend_type="file", page_get_func="theirs")


def test_importing_the_plugin_imports_no_sglang() -> None:
    code = (
        "import sys, ucm.integration.sglang.plugin;"
        "sys.exit(any(name in sys.modules for name in ('sglang', 'torch', 'ucm.store')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 # Our own command.
