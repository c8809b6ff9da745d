# SPDX-License-Identifier: MIT
"""Watch a real SGLang server restore hybrid models' prefixes from disk after a restart; no GPU needed.

Patches a copy of the installed SGLang; then, for each of two tiny models, serves it with our backend,
validates the hit rates of every tier, restarts the server, and validates that the restarted one restores all
from disk. Everything goes below `reports/demo`: a report for each model, a summary, the servers' logs, and
what was stored.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sglang_cpu import launch
from sglang_cpu.tiny_models import WRITERS

from ucm.testing.cpu_deployment import CpuDeployment
from ucm.testing.restartable_server import RestartableServer
from ucm.testing.sglang_selection import Selection, patched_copy

if TYPE_CHECKING:
    from types import FrameType

REPORTS = Path(__file__).resolve().parent.parent / "reports" / "demo"
TAIL_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """A model the demo shows.

    Args:
        family: Which tiny model to write.
        served_name: What the server and the report call it.
        about: What is special about its cache, for the reader.
        report: File name below the reports directory.
        flags: What its server needs besides.
    """

    family: str
    served_name: str
    about: str
    report: str
    flags: tuple[str, ...] = ()


MODELS = (
    DemoModel(
        family="qwen3_5",
        served_name="qwen3.5-tiny",
        about="recurrent (MAMBA) state in three layers, KV in one: a prefix needs both",
        report="report.json",
    ),
    DemoModel(
        family="deepseek_v4",
        served_name="deepseek-v4-tiny",
        about="an index without bytes, and six pools: a prefix needs all of them",
        report="deepseek_v4.json",
        flags=("--max-total-tokens", "4096"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the restarted server restored of a model, and what lies on disk.

    Args:
        model: Its served name.
        met: Whether every expectation was met, before the restart too.
        restored_tokens: Tokens that came from disk.
        restorable_tokens: Tokens that should have.
        max_abs_logprob_delta: Largest difference to the uncached answers.
        pools: As in the report.
    """

    model: str
    met: bool
    restored_tokens: int = 0
    restorable_tokens: int = 0
    max_abs_logprob_delta: float = 0.0
    pools: tuple[dict[str, Any], ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of the restorable tokens that came from disk."""
        return self.restored_tokens / self.restorable_tokens if self.restorable_tokens else 0.0

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        return (
            f"{'PASSED' if self.met else 'FAILED'}: after its restart the server took {self.restored_tokens} "
            f"of {self.restorable_tokens} restorable tokens of {self.model} from disk; largest logprob "
            f"difference to the uncached answers: {self.max_abs_logprob_delta:g}"
        )


def main() -> int:
    """Run the demo and return its exit status: 0 if every expectation was met."""
    families = [model.family for model in MODELS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "families", nargs="*", metavar="MODEL", help=f"of {', '.join(families)} (default: all)"
    )
    wanted = parser.parse_args().families or families
    if unknown := set(wanted) - set(families):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(families)}")
    # So that servers end when the demo is ended.
    signal.signal(signal.SIGTERM, _exit)

    started = time.monotonic()
    shutil.rmtree(REPORTS, ignore_errors=True)
    try:
        _step("Patch a copy of the installed SGLang, so that it knows the backend `unifiedcache`")
        patched = patched_copy(REPORTS / "site-packages")
        outcomes = [_show(model, patched) for model in MODELS if model.family in wanted]
    except launch.ServerFailedError as error:
        print(f"\nThe server did not start: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(REPORTS / "site-packages", ignore_errors=True)
    _step("What was stored, and what the restarted servers took back")
    _summarise(outcomes)
    print(f"{time.monotonic() - started:.0f} s; reports and logs are in {REPORTS}")
    return 0 if all(outcome.met for outcome in outcomes) else 1


def _show(model: DemoModel, patched: Path) -> Outcome:
    """Serve, validate, restart and validate again."""
    _step(f"Write {model.served_name}: {model.about}")
    directory = REPORTS / model.family
    checkpoint = directory / "model"
    checkpoint.mkdir(parents=True)
    WRITERS[model.family](checkpoint, 0)
    deployment = CpuDeployment(
        model=checkpoint,
        selection=Selection.PATCHED,
        sglang=patched,
        layout="page_first",
        chunk_tokens=-1,
        storage_roots=(directory / "storage",),
        extra_flags=("--served-model-name", model.served_name, *model.flags),
    )
    report = REPORTS / model.report
    _step("Start the server (about a minute)")
    with RestartableServer(deployment, directory) as server:
        _step("Send prompts cold, from L1, from L2, and from disk after a flush of both")
        first = _validate(server, "--report", str(report), "--selection", deployment.selection.value)
        _step("Restart the server: only what is on disk survives")
        server.restart()
        _step("Send the same prompts to the restarted server")
        second = _validate(server, "--after-restart", str(report))
        if first or second:
            print(f"\nThe end of {server.logs[-1]}:", file=sys.stderr)
            print("\n".join(server.logs[-1].read_text().splitlines()[-TAIL_LINES:]), file=sys.stderr)
    return _outcome(model, report)


def _validate(server: RestartableServer, *arguments: str) -> int:
    """Run `ucm-sglang validate` and return its exit status."""
    command = [sys.executable, "-m", "ucm.cli.main", "validate", "--url", server.url, *arguments]
    print("$ ucm-sglang", *command[3:], flush=True)
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode


def _outcome(model: DemoModel, report: Path) -> Outcome:
    """Read what the restart restored from the report."""
    if not report.exists():
        return Outcome(model=model.served_name, met=False)
    document = json.loads(report.read_text())
    restarted = [phase for phase in document["phases"] if phase["name"].startswith("restart")]
    return Outcome(
        model=model.served_name,
        met=bool(document["ok"] and restarted),
        restored_tokens=sum(phase["cached"]["storage"] for phase in restarted),
        restorable_tokens=sum(phase["expected_storage"] for phase in restarted),
        max_abs_logprob_delta=max((phase["max_abs_logprob_delta"] for phase in restarted), default=0.0),
        pools=tuple(document["pools"]),
    )


def _summarise(outcomes: list[Outcome]) -> None:
    """Print every pool, and a verdict on each model; write the same as `summary.json`."""
    for outcome in outcomes:
        table = Table(
            title=outcome.model, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        table.add_column("pool", no_wrap=True)
        for heading in ("page bytes", "pages", "bytes", "hit rate"):
            table.add_column(heading, justify="right", no_wrap=True)
        for pool in outcome.pools:
            sizes = (str(pool[field]) for field in ("page_bytes", "pages", "bytes"))
            # A prefix comes back only if every pool gives its part, so they share one hit rate.
            table.add_row(pool["name"], *sizes, f"{outcome.hit_rate:.0%}")
        Console().print(table)
    for outcome in outcomes:
        print(outcome.verdict)
    document = [asdict(outcome) | {"hit_rate": outcome.hit_rate} for outcome in outcomes]
    (REPORTS / "summary.json").write_text(json.dumps(document, indent=2) + "\n")


def _step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
