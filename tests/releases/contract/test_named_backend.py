# SPDX-License-Identifier: MIT
"""What the release makes of `--hicache-storage-backend unifiedcache`: patched, or with the plugin alone.

With `UCM_TEST_PLUGIN` set, SGLang's plugins are loaded as in a scheduler, and the package is as released.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.testing.release_pools import build_pools, find

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.testing.release_pools import ReleaseController, ReleasePools

BACKEND = "unifiedcache"
IO_BACKENDS = {"kernel": "page_first", "direct": "page_first_direct"}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    """Load plugins where they are what makes the name known."""
    if "UCM_TEST_PLUGIN" not in os.environ:
        return
    # The real one needs packages of the release's own age; our plugin only asks whether it is there.
    sys.modules.setdefault("sglang.srt.managers.scheduler", ModuleType("sglang.srt.managers.scheduler"))
    find("plugins:load_plugins")()


def parsed_backend(name: str) -> str:
    """Parse the flag as a server does; returns its value."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with contextlib.redirect_stderr(io.StringIO()):
        arguments = parser.parse_args(["--model-path", "m", "--hicache-storage-backend", name])
    return str(arguments.hicache_storage_backend)


def resolved(**wanted: object) -> Any:  # noqa: ANN401 # Server arguments.
    """Resolve server arguments for HiCache as a server does when it starts."""
    wanted = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, **wanted}
    handle = find("arg_groups.hicache_hook:handle_hicache")
    if handle is not None:
        arguments = ServerArgs(model_path="m", **wanted)
        handle(arguments)
        return find("arg_groups.overrides:resolving_view")(arguments)
    if not hasattr(ServerArgs, "_resolve_storage_layout_compatibility"):
        pytest.skip("this SGLang resolves all of HiCache in one step: tests/releases/test_hiradix_cache.py")
    # Its constructor would resolve everything else as well, and wants a model for that.
    arguments = object.__new__(ServerArgs)
    vars(arguments).update(wanted)
    arguments._handle_hicache()
    return arguments


def resolved_layout(backend: str, io_backend: str) -> str:
    """Resolve server arguments that ask for layer_first; returns the layout they end up with."""
    arguments = resolved(
        hicache_mem_layout="layer_first", hicache_io_backend=io_backend, hicache_storage_backend=backend
    )
    return str(arguments.hicache_mem_layout)


def test_the_command_line_accepts_unifiedcache() -> None:
    assert parsed_backend(BACKEND) == BACKEND


def test_the_command_line_takes_other_names_as_before() -> None:
    assert parsed_backend("file") == "file"
    with pytest.raises(SystemExit):
        parsed_backend("no-such-backend")


def test_the_factory_builds_our_store(controller: ReleaseController, storage: dict[str, Any]) -> None:
    controller.attach(BACKEND, storage)

    assert type(controller.backend) is UnifiedCacheStore


def test_pages_are_read_and_written_in_place(controller: ReleaseController, storage: dict[str, Any]) -> None:
    controller.attach(BACKEND, storage)

    assert controller.inner.page_get_func.__name__ == "_page_get_zero_copy"
    assert controller.inner.page_set_func.__name__ == "_page_set_zero_copy"


def test_dynamic_loading_gives_the_same(controller: ReleaseController, storage: dict[str, Any]) -> None:
    module = {"module_path": UnifiedCacheStore.__module__, "class_name": UnifiedCacheStore.__name__}
    controller.attach("dynamic", {**storage, **module, "backend_name": BACKEND, "interface_v1": 1})

    assert type(controller.backend) is UnifiedCacheStore
    assert controller.inner.page_get_func.__name__ == "_page_get_zero_copy"


def test_other_backends_keep_their_page_functions(
    controller: ReleaseController,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,  # noqa: ANN401 # A path.
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    controller.attach("file", {})

    assert controller.inner.page_get_func.__name__ == "_generic_page_get"


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_layer_first_becomes_a_page_first_layout(io_backend: str) -> None:
    assert resolved_layout(BACKEND, io_backend) == IO_BACKENDS[io_backend]


def test_layer_first_stays_for_other_backends() -> None:
    assert resolved_layout("file", "kernel") == "layer_first"


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_linear_attention_states_get_a_layout_that_their_pool_takes(layout: str, io_backend: str) -> None:
    arguments = resolved(
        hicache_mem_layout=layout,
        hicache_io_backend=io_backend,
        hicache_storage_backend=BACKEND,
        uses_mamba_radix_cache=True,  # As SGLang derives it from the model's architecture.
    )

    assert build_pools("mamba", arguments.hicache_mem_layout) is not None
    assert IO_BACKENDS[arguments.hicache_io_backend] == arguments.hicache_mem_layout


def test_page_first_stays_for_models_without_such_states() -> None:
    arguments = resolved(
        hicache_mem_layout="page_first", hicache_io_backend="kernel", hicache_storage_backend=BACKEND
    )

    assert (arguments.hicache_mem_layout, arguments.hicache_io_backend) == ("page_first", "kernel")


def test_every_rank_writes_its_own_draft_pages(
    controller: ReleaseController,
    storage: dict[str, Any],
    pools: Callable[..., ReleasePools],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft pool is of multi-head attention; its sliding-window twin of latent attention is a replica."""
    names = find("mem_cache.hicache_storage:PoolName")
    if not hasattr(controller.inner, "should_backup") or not hasattr(names, "DRAFT_SWA"):
        pytest.skip("this SGLang has no draft pools among its sidecars")
    transfer = find("mem_cache.hicache_storage:PoolTransfer")
    controller.attach(BACKEND, storage)
    # As on rank 1 beside an anchor that is the same on all ranks.
    cls = type(controller.inner)
    owner = cls if isinstance(getattr(cls, "backup_skip", None), property) else controller.inner
    monkeypatch.setattr(owner, "backup_skip", True)
    drafts = {names.DRAFT: pools("mha").anchor, names.DRAFT_SWA: pools("mla").anchor}
    for name, pool in drafts.items():
        controller.inner.mem_pool_host.entry_map[name] = SimpleNamespace(host_pool=pool)

    written = {
        name.value: controller.inner.should_backup(transfer(name=name)) for name in (*drafts, names.MAMBA)
    }

    assert written == {"draft": True, "draft_swa": False, "mamba": True}


def test_the_draft_pool_has_a_store_of_its_own(
    controller: ReleaseController, storage: dict[str, Any], pools: Callable[..., ReleasePools]
) -> None:
    if not hasattr(controller.inner, "_maybe_register_draft_with_storage"):
        pytest.skip("this SGLang registers no draft pool beside its sidecars")
    draft = pools("mha").anchor
    controller.attach(BACKEND, storage)
    controller.inner.set_draft_kv_pool(controller.pools.device, draft)

    controller.inner.draft_page_set_func(["a"], torch.arange(64))

    transfer, names = (find(f"mem_cache.hicache_storage:{name}") for name in ("PoolTransfer", "PoolName"))
    query = [transfer(name=names.DRAFT, host_indices=torch.arange(64), keys=["a"])]
    assert controller.backend.batch_get_v2(query) == {names.DRAFT: [True]}
