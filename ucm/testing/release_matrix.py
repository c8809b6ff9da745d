# SPDX-License-Identifier: MIT
"""What the contract tests of each release have shown, as the table in `docs/releases.md`."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LAYOUTS = ("page_first", "page_first_direct")
_BEGIN, _END = "<!-- generated: nox -s release-matrix -->", "<!-- end -->"
COLUMNS = (
    *("SGLang", "v1: KV", "v2: linear-attention states", "v2: sparse-attention index", "v2: DeepSeek V4"),
    *("layouts", "selected by", "patches", "storage threads survive an exception"),
)
_HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
_KEEPS_THREADS = re.compile("survive-a-failing|storage-threads-alive")
_OTHER = ("skipped", "failure", "error")


@dataclass(frozen=True, slots=True)
class Row:
    """A release: its patches, and what became of each contract test, patched and with the plugin."""

    version: str
    patches: Sequence[str]
    patched: Mapping[str, str]
    plugin: Mapping[str, str]

    def summary(self) -> str:
        """Return how many tests have passed."""
        passed = list(self.patched.values()).count("passed")
        skipped = len(self.patched) - passed
        plugin = f", {list(self.plugin.values()).count('passed')} with the plugin" if self.plugin else ""
        return f"{passed} passed{plugin}, {skipped} do not concern this release"

    def text(self) -> str:
        """Return its line of the table."""
        layouts = [layout for layout in _LAYOUTS if self._moves("the_anchor", f"mha-{layout}")]
        cells = (
            self.version,
            "yes" if layouts and all(self._moves("the_anchor", f"mla-{each}") for each in layouts) else "no",
            self._sidecar("mamba"),
            self._sidecar("indexer"),
            self._sidecar("deepseek_v4"),
            ", ".join(layouts),
            ", ".join(self._ways()),
            str(len(self.patches)),
            "with a patch" if any(_KEEPS_THREADS.search(name) for name in self.patches) else "by itself",
        )
        return f"| {' | '.join(cells)} |\n"

    def _moves(self, what: str, case: str) -> bool:
        return self.patched.get(f"test_pages_of_{what}_come_back_in_other_places[{case}]") == "passed"

    def _sidecar(self, kind: str) -> str:
        layouts = [layout for layout in _LAYOUTS if self._moves("sidecars", f"{kind}-{layout}")]
        if layouts:
            return "yes" if len(layouts) == len(_LAYOUTS) else f"{layouts[0]} only"
        refused = "test_pools_that_a_release_has_in_one_layout_only_are_refused_with_the_release_to_use"
        if kind == "deepseek_v4" and self.patched.get(refused) == "passed":
            return "refused: layer_first only"
        return "no such pools"

    def _ways(self) -> list[str]:
        built = "test_the_factory_builds_our_store"
        ways = {
            "patch": self.patched.get(built),
            "plugin": self.plugin.get(built),
            "dynamic": self.patched.get("test_dynamic_loading_gives_the_same"),
        }
        return [way for way, outcome in ways.items() if outcome == "passed"]


def outcomes(report: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit report, by its name."""
    cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 # Written by our own pytest.
    return {
        case.get("name", ""): next((child.tag for child in case if child.tag in _OTHER), "passed")
        for case in cases
    }


def write(document: Path, rows: Sequence[Row]) -> None:
    """Replace the table in `document`."""
    text = document.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    table = _HEADER + "".join(row.text() for row in rows)
    document.write_text(f"{before}{_BEGIN}\n\n{table}\n{_END}{after}", encoding="utf-8")
