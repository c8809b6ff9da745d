# SPDX-License-Identifier: MIT
"""What SGLang 0.5.9 makes of our backend, printed as JSON; run as a process of its own.

    python hiradix_process.py DIRECTORY OBSERVATION...           one server of one rank
    python hiradix_process.py DIRECTORY two-ranks RANK           one of two tensor parallel ranks

The SGLang to observe comes first on the path. Each observation has a directory of its own, and is a value or,
where SGLang refuses, the message of the exception.
"""

# ruff: noqa: T201 # The output is what this is for.

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ucm.testing import hiradix_stack  # First: it provides what SGLang imports.
from ucm.testing.hiradix_stack import MODEL_NAME, PAGE_TOKENS, HiradixStack, start_ranks

# isort: split
import torch.distributed
from sglang.srt.server_args import ServerArgs

from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.testing.block_damage import flip_payload, remove
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

BACKEND = "unifiedcache"
PROMPT = list(range(4 * PAGE_TOKENS))
INDEXER = "indexer_25344x1"  # Three layers of 64 tokens with 132 bytes each.
LAYOUTS = ("page_first", "page_first_direct")


class RaisingStore(UnifiedCacheStore):
    """Our backend, except that one method raises while `failing` names it."""

    failing: ClassVar[str | None] = None

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: object = None) -> None:
        super().__init__(storage_config, mem_pool_host)
        for method in ("batch_exists", "batch_get_v1", "batch_set_v1"):
            setattr(self, method, self._raising(method, getattr(self, method)))

    def _raising(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def raise_or_call(*arguments: object) -> object:
            if method == self.failing:
                raise OSError(5, "I/O error", method)
            return call(*arguments)

        return raise_or_call


def named(root: Path) -> dict[str, Any]:
    """Select our backend by its name."""
    return {"storage_backend": BACKEND, "extra_config": {"storage_backends": str(root)}}


def dynamic(
    root: Path,
    class_name: str = "UnifiedCacheStore",
    module_path: str = "ucm.integration.sglang.unifiedcache_store",
    *,
    zero_copy: bool = True,
) -> dict[str, Any]:
    """Select our backend, or another class, as SGLang's `dynamic` one."""
    return {
        "storage_backend": "dynamic",
        "extra_config": {
            "backend_name": BACKEND,
            "module_path": module_path,
            "class_name": class_name,
            "interface_v1": int(zero_copy),
            "storage_backends": str(root),
        },
    }


def recording(root: Path) -> dict[str, Any]:
    """Select our backend, keeping a list of the calls."""
    return dynamic(root, "RecordingStore", "ucm.testing.recording_store")


def calls_of(stack: HiradixStack) -> list[str]:
    """Return the names of the methods that SGLang has called, in order."""
    return [call.method for call in stack.backend.calls]


def serve(model: str, storage: dict[str, Any], **options: Any) -> AbstractContextManager[HiradixStack]:  # noqa: ANN401
    return hiradix_stack.hiradix_stack(model, **storage, **options)


def outcome(inserted: list[dict[str, bytes]], found: hiradix_stack.Restored) -> dict[str, Any]:
    """Say how many pages came from storage, and which kinds of bytes differ in pages on the device."""
    pairs = list(zip(inserted, found.pages, strict=False))
    kinds = inserted[0].keys()
    return {
        "pages": found.storage_tokens // PAGE_TOKENS,
        "on the device": len(found.pages),
        "differing": sorted(kind for kind in kinds if any(then[kind] != now[kind] for then, now in pairs)),
    }


def restart(model: str, storage: dict[str, Any], layout: str = "page_first") -> dict[str, Any]:
    """Store a prompt, and restore it in a new server."""
    with serve(model, storage, layout=layout, seed=1) as first:
        inserted = first.insert(PROMPT)
    with serve(model, storage, layout=layout, seed=2) as second:
        return restored(second, inserted)


def restored(stack: HiradixStack, inserted: list[dict[str, bytes]]) -> dict[str, Any]:
    """Restore the prompt; tell also how many host pages are in use, and whether the memory is intact."""
    seen = outcome(inserted, stack.restore(PROMPT))
    used = stack.tree.token_to_kv_pool_host.size - stack.free_host_tokens()
    return {**seen, "host pages": used // PAGE_TOKENS, "intact": hiradix_stack.host_memory_is_intact()}


def restores(root: Path) -> dict[str, dict[str, Any]]:
    """Restart each model in each layout, with the backend selected by name."""
    return {
        f"{model} {layout}": restart(model, named(root / model / layout), layout)
        for model in hiradix_stack.MODELS
        for layout in LAYOUTS
    }


def nsa(root: Path) -> dict[str, Any]:
    """Restart a model with an index."""
    return restart("nsa", named(root))


def stored(root: Path) -> dict[str, Any]:
    """Store a prompt of a model with an index; returns the number of blocks, and digests of the pages."""
    with serve("nsa", named(root)) as stack:
        pages = stack.insert(PROMPT)
    digests = [{kind: hashlib.sha256(page[kind]).hexdigest() for kind in page} for page in pages]
    return {"blocks": StoredBlocks(root, MODEL_NAME, replicated=True).counts(), "digests": digests}


def through_copies(root: Path) -> dict[str, dict[str, Any]]:
    """Restart every model where SGLang copies pages instead of handing them over."""
    return {model: restart(model, dynamic(root / model, zero_copy=False)) for model in hiradix_stack.MODELS}


def plain_models_dynamic(root: Path) -> dict[str, dict[str, Any]]:
    """Restart the models without an index."""
    return {model: restart(model, dynamic(root / model)) for model in ("mha", "mla")}


def long_prompt(root: Path) -> dict[str, Any]:
    """Restore a prompt longer than one batch of the controller, of which the device has the first pages."""
    prompt = list(range(300 * PAGE_TOKENS))
    with serve("nsa", named(root), seed=1, pages=301) as first:
        inserted = first.insert(prompt)
    with serve("nsa", named(root), seed=2, pages=301) as second:
        second.restore(prompt[: 2 * PAGE_TOKENS])
        return outcome(inserted, second.restore(prompt))


def bad_index_pages(root: Path) -> dict[str, dict[str, Any]]:
    """Lose or damage one page of the index; returns what a restart then restores, and the next one."""
    seen = {}
    for page in (0, 2, 3):
        for damage, do in (("missing", remove), ("damaged", flip_payload)):
            storage = named(root / f"{damage}{page}")
            with serve("nsa", storage, seed=1) as first:
                inserted = first.insert(PROMPT)
                page_hash = first.page_hashes()[page]
            blocks = StoredBlocks(root / f"{damage}{page}", MODEL_NAME, replicated=True)
            do(blocks.sidecar(INDEXER, page_hash))
            with serve("nsa", storage, seed=2) as second:
                seen[f"{damage} {page}"] = outcome(inserted, second.restore(PROMPT))
    return seen


def calls(root: Path) -> dict[str, list[str]]:
    """Store and restore with each model; returns the calls in order."""
    seen = {}
    for model in hiradix_stack.MODELS:
        with serve(model, recording(root / model)) as first:
            first.insert(PROMPT)
            seen[model] = calls_of(first)
        with serve(model, recording(root / model)) as second:
            second.restore(PROMPT)
            seen[model] += calls_of(second)
    return seen


def refusals(root: Path) -> dict[str, Any]:
    """Attach what must not be attached."""

    def attach(model: str, storage: dict[str, Any], layout: str = "page_first") -> str:
        with serve(model, storage, layout=layout):
            return "attached"

    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(root)
    file = {"storage_backend": "file"}
    observed(attach, "nsa", dynamic(root / "other"))
    return {
        "nsa other layout": observed(attach, "nsa", dynamic(root / "other"), "page_first_direct"),
        "nsa": observed(attach, "nsa", dynamic(root)),
        "nsa layer_first": observed(attach, "nsa", dynamic(root), "layer_first"),
        "nsa file": observed(attach, "nsa", file),
        "mla file": observed(attach, "mla", file),
    }


def index_of_file(root: Path) -> dict[str, Any]:
    """Restart a model with an index over SGLang's own `file` backend, which stores KV only."""
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(root)
    return restart("nsa", {"storage_backend": "file"})


def failing_calls(root: Path) -> dict[str, dict[str, Any]]:
    """Let one kind of call raise once; returns which threads are dead then, and what works afterwards."""
    seen = {}
    for method in ("batch_exists", "batch_get_v1", "batch_set_v1"):
        storage = dynamic(root / method, "RaisingStore", __name__)
        with serve("mha", storage, seed=1) as first:
            inserted = first.insert(PROMPT)
        with serve("mha", storage, seed=2) as second:
            RaisingStore.failing = method
            if method == "batch_set_v1":
                lost = observed(lambda: len(second.insert(PROMPT[::-1])))
            else:
                lost = observed(second.prefetch, PROMPT)
            RaisingStore.failing = None
            dead = second.dead_threads()
            afterwards = None if dead else restored(second, inserted)
            seen[method] = {"lost": lost, "dead": dead, "afterwards": afterwards}
    return seen


def layouts(root: Path) -> dict[str, str]:
    """Resolve server arguments that ask for layer_first; returns the layouts they end up with."""
    del root

    def resolve(backend: str, io_backend: str) -> str:
        arguments = ServerArgs(
            "dummy",
            enable_hierarchical_cache=True,
            hicache_storage_backend=backend,
            hicache_io_backend=io_backend,
        )
        arguments._handle_hicache()
        return str(arguments.hicache_mem_layout)

    return {
        "kernel": resolve(BACKEND, "kernel"),
        "direct": resolve(BACKEND, "direct"),
        "file": resolve("file", "kernel"),
    }


OBSERVATIONS = {
    observation.__name__: observation
    for observation in (
        bad_index_pages,
        calls,
        failing_calls,
        index_of_file,
        layouts,
        long_prompt,
        nsa,
        plain_models_dynamic,
        refusals,
        restores,
        stored,
        through_copies,
    )
}


def two_ranks(root: Path) -> dict[str, Any]:
    """Serve a model with an index on this rank; in the end rank 1 alone loses the index of the last page."""
    rank = torch.distributed.get_rank()
    storage = recording(root)
    with serve("nsa", storage, seed=1, tp_size=2) as first:
        inserted = first.insert(PROMPT)
        writer = calls_of(first)
        torch.distributed.barrier()
    with serve("nsa", storage, seed=2, tp_size=2) as second:
        both = outcome(inserted, second.restore(PROMPT))
        torch.distributed.barrier()
        if rank == 1:
            pool = second.backend._connector._sidecars["indexer"]
            pool.store.delete(pool._keys(second.page_hashes()[-1:]))
        torch.distributed.barrier()
    with serve("nsa", storage, seed=3, tp_size=2) as third:
        after_loss = outcome(inserted, third.restore(PROMPT))
        torch.distributed.barrier()
    blocks = StoredBlocks(root, MODEL_NAME).counts()
    return {"calls": writer, "blocks": blocks, "restored": both, "after a loss on rank 1": after_loss}


def observed(observe: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 # Anything JSON can say.
    try:
        return observe(*arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Observe and print."""
    logging.disable(logging.CRITICAL)
    directory = Path(sys.argv[1])
    if sys.argv[2] == "two-ranks":
        start_ranks(int(sys.argv[3]), 2, directory / "rendezvous")
        seen = two_ranks(directory / "storage")
    else:
        start_ranks(0, 1, directory / "rendezvous")
        seen = {name: observed(OBSERVATIONS[name], directory / name) for name in sys.argv[2:]}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
