# SPDX-License-Identifier: MIT
"""`ucm-sglang validate`: drive a running SGLang server and check what its cache restores."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ucm.validation.client import ServerError, SGLangClient
from ucm.validation.results import Continuation, Report, load_continuation, save
from ucm.validation.scenario import Settings
from ucm.validation.table import print_report
from ucm.validation.validate import Surroundings, validate, validate_after_restart

if TYPE_CHECKING:
    from collections.abc import Callable

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 # argparse has no public name for it.

MET, NOT_MET, UNUSABLE = 0, 1, 2
_DEFAULTS = Settings()

_DESCRIPTION = """\
Send prompts nobody has sent before to a running SGLang server, and again when they are in L1, in L2, and only
on storage; then a longer prompt, a conversation, and several prompts at once. Compare how many tokens each
tier gave with what the server's page size and model allow, and every answer with the uncached one. The
server's L1 and L2 are flushed.
"""

_EPILOG = """\
across a restart:
  ucm-sglang validate --url http://127.0.0.1:30000 --report report.json
  (restart the server)
  ucm-sglang validate --url http://127.0.0.1:30000 --after-restart report.json

exit status: 0 every expectation was met, 1 some were not, 2 the server could not be validated or the usage is
wrong. docs/validate.md describes the phases and the report.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the `validate` command."""
    parser = subparsers.add_parser(
        "validate",
        help="check a running server's hit rates, tier by tier",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--url", required=True, help="the server, for example http://127.0.0.1:30000")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's --api-key (or --admin-api-key, if it has one)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="where to write the report (default: report.json)"
    )
    parser.add_argument(
        "--after-restart",
        type=Path,
        metavar="REPORT",
        help="send the prompts of an earlier run to a server that has just started; "
        "adds to that report unless --report names another",
    )
    parser.add_argument(
        "--selection",
        choices=["patched", "plugin", "dynamic"],
        help="how the server got its backend, for the report (default: what the server tells)",
    )
    parser.add_argument(
        "--storage-dir",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="where the server's pages lie, to watch backups and to list the pools; once per storage root "
        "(default: where the server says, if that is on this machine)",
    )
    _add_prompt_options(parser.add_argument_group("prompts"))
    _add_expectation_options(parser.add_argument_group("expectations"))
    _add_waiting_options(parser.add_argument_group("waiting"))


def run(arguments: argparse.Namespace) -> int:
    """Carry out the parsed command and return its exit status."""
    started = time.monotonic()
    progress = Console(stderr=True, highlight=False, markup=False)

    def say(line: str) -> None:
        progress.print(f"[{time.monotonic() - started:6.1f}s] {line}", soft_wrap=True)

    try:
        report, continuation = _validate(arguments, say)
        path = arguments.report or arguments.after_restart or Path("report.json")
        save(report, continuation, path)
    except (ServerError, OSError, ValueError) as error:
        print(f"ucm-sglang validate: {error}", file=sys.stderr)  # noqa: T201 # A command's output.
        return UNUSABLE
    print_report(report, Console())
    say(f"report: {path}")
    return MET if report.ok or arguments.report_only else NOT_MET


def _validate(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[Report, Continuation]:
    settings = Settings(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        at_once=arguments.at_once,
        expect_fraction=arguments.expect_fraction,
        logprob_tolerance=arguments.logprob_tolerance,
        same_tokens=not arguments.allow_different_tokens,
        max_filler_tokens=arguments.max_filler_tokens,
    )
    surroundings = Surroundings(
        selection=arguments.selection,
        storage_roots=arguments.storage_dir,
        vocabulary=arguments.vocab_size,
        settle_s=arguments.settle,
    )
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    with SGLangClient(arguments.url, api_key=arguments.api_key, timeout_s=arguments.timeout) as client:
        if arguments.after_restart:
            earlier = load_continuation(arguments.after_restart)
            return validate_after_restart(client, earlier, settings, surroundings, seed=seed, say=say)
        return validate(client, settings, surroundings, seed=seed, say=say)


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-tokens",
        type=_count,
        metavar="N",
        help="length of a prompt (default: a bit over 256)",
    )
    group.add_argument(
        "--output-tokens",
        type=_count,
        default=_DEFAULTS.output_tokens,
        metavar="N",
        help="tokens generated and compared (default: %(default)s)",
    )
    group.add_argument(
        "--at-once",
        type=_count_or_0,
        default=_DEFAULTS.at_once,
        metavar="N",
        help="prompts sent concurrently, 0 for none (default: %(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        type=_count,
        metavar="N",
        help="token ids stay below this (default: the model's, at most 10000)",
    )
    group.add_argument(
        "--seed", type=int, help="of the prompts (default: random, so that no earlier run's pages are hit)"
    )


def _add_expectation_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--expect-fraction",
        type=_fraction,
        default=_DEFAULTS.expect_fraction,
        metavar="F",
        help="share of the expected tokens that must be reused (default: %(default)s)",
    )
    group.add_argument(
        "--logprob-tolerance",
        type=_not_negative,
        default=_DEFAULTS.logprob_tolerance,
        metavar="D",
        help="largest difference to the uncached answer's logprobs (default: %(default)s; "
        "most GPU kernels are not bit-deterministic and need more)",
    )
    group.add_argument(
        "--allow-different-tokens",
        action="store_true",
        help="compare logprobs up to the first token that differs, instead of failing there",
    )
    group.add_argument(
        "--report-only", action="store_true", help="exit with 0 even if expectations were not met"
    )


def _add_waiting_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--settle",
        type=_not_negative,
        metavar="S",
        help="storage counts as complete after this many quiet seconds; if neither its directory nor metrics "
        "can be watched, the whole wait (default: 1 and 10)",
    )
    group.add_argument(
        "--timeout",
        type=_not_negative,
        default=600.0,
        metavar="S",
        help="for one request (default: %(default)s)",
    )
    group.add_argument(
        "--max-filler-tokens",
        type=_count_or_0,
        default=_DEFAULTS.max_filler_tokens,
        metavar="N",
        help="leave the L2 phase out if filling L1 takes more tokens (default: %(default)s)",
    )


def _count(text: str) -> int:
    value = _count_or_0(text)
    if not value:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count_or_0(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # NaN compares as not at least 0, too.
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _fraction(text: str) -> float:
    value = _not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1")
    return value
