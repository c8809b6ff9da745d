# SPDX-License-Identifier: MIT
"""The model families this platform can serve. A new family adds one line here and a package of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """What one family of models needs beside the platform itself.

    Attributes:
        name: Shown in messages.
        install: Registers the family's replacements with `sglang_cpu.hooks`. Called once in every process of
            a server, before SGLang builds anything; imports of torch or SGLang belong inside it.
        environment: SGLang switches to set unless the operator has set them.
    """

    name: str
    install: Callable[[], None]
    environment: Mapping[str, str] = field(default_factory=dict)


def families() -> tuple[ModelFamily, ...]:
    """Return all families. Importing them must stay cheap: every process of a server does it."""
    from sglang_cpu import deepseek_v4, gdn, older_releases

    return (gdn.FAMILY, deepseek_v4.FAMILY) if older_releases.serves_deepseek_v4() else (gdn.FAMILY,)
