# SPDX-License-Identifier: MIT
"""Deployments of real models with our backend on the GPUs of this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from ucm.testing.deployment import Deployment
from ucm.testing.sglang_selection import selection_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDeployment(Deployment):
    """A server as an operator starts it, with the SGLang of this interpreter.

    Args:
        tp: `--tp`, the number of GPUs.
    """

    tp: int

    def command(self, port: int) -> list[str]:
        """Return the command line of a server on this port."""
        # Not the script `sglang`: in a container it need not lie beside the interpreter.
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port)),
            *("--tp", str(self.tp)),
            *self.cache_flags(),
            *self.extra_flags,
        ]

    def environment(self) -> dict[str, str]:
        """Return the server's whole environment."""
        return dict(os.environ) | selection_environment(self.selection, sglang=self.sglang, other_plugins=[])
