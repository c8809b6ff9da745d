# SPDX-License-Identifier: MIT
"""Compute as servers do: `sglang_cpu.launch` starts them with one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # How work is cut among several threads depends on its size, and with it the last bit of a sum.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
