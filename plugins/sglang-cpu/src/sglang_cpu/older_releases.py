# SPDX-License-Identifier: MIT
"""What SGLang 0.5.19 to 0.5.21 ask for besides, told from what they have.

They serve MAMBA hybrids here, on one rank. DeepSeek V4 needs the functions of a newer release.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_V4_FUNCTIONS = "sglang.kernels.ops.attention.dsv4.norm_rope"
_CONFIGURATIONS = "transformers.models.auto.configuration_auto"


def is_older() -> bool:
    """Tell whether this SGLang is one of them."""
    return not serves_deepseek_v4()


def serves_deepseek_v4() -> bool:
    """Tell whether this SGLang has the functions that the DeepSeek V4 family replaces."""
    return has_module(_V4_FUNCTIONS)


def has_module(name: str) -> bool:
    """Tell whether a module of SGLang exists, without importing even the packages above it."""
    package = find_spec("sglang")
    if package is None:
        return False
    path = Path(*name.split(".")[1:])
    roots = [Path(root) for root in package.submodule_search_locations or ()]
    return any((root / path).is_dir() or (root / path.with_suffix(".py")).is_file() for root in roots)


def accept_known_configurations() -> None:
    """Let SGLang register a model configuration that a newer transformers already has; SGLang's counts."""
    mapping = import_module(_CONFIGURATIONS)._LazyConfigMapping  # noqa: SLF001 # It has no other way in.
    register = mapping.register

    def register_again(self: Any, key: str, value: Any, exist_ok: bool = False) -> None:  # noqa: ANN401
        del exist_ok
        register(self, key, value, exist_ok=True)

    mapping.register = register_again


def answer_with_the_cpu() -> None:
    """Let torch name the CPU's streams and events, and pin no memory: SGLang asks for both in any case."""
    import torch

    if torch.cuda.is_available():
        return
    original = torch.tensor

    def tensor(data: object, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ANN401
        del pin_memory
        return original(data, **options)

    vars(torch).update(get_device_module=lambda *_: torch.cpu, tensor=tensor)


class _Launch:
    """A function in the place of a Triton kernel, which is called as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _next_power_of_2: int,
    page_size: int,
) -> None:
    """Give every new token of each request the place after the one before, or the first of a free page.

    Without enough free pages the result means nothing; SGLang counts them afterwards.
    """
    pages = iter(free_pages.tolist())
    places = []
    for prefix, end, place in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        for position in range(prefix, end):
            place = next(pages, 0) * page_size if position % page_size == 0 else place + 1
            places.append(place)
    out_indices.copy_(out_indices.new_tensor(places))


def decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    next_power_of_2: int,
    page_size: int,
) -> None:
    """Give one new token of each request its place, as `extend` does."""
    extend(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, next_power_of_2, page_size)


def install() -> None:
    """Replace what these releases decide by the name of a device."""
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.mem_cache.allocator import paged

    vars(paged).update(alloc_extend_kernel=_Launch(extend), alloc_decode_kernel=_Launch(decode))
    # It asserts one of five kinds of devices; the settings that it checks besides are the tiny models' own.
    vars(mamba_hook)["validate_mamba_extra_buffer"] = lambda *_, **__: None
