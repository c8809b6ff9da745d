# SPDX-License-Identifier: MIT
"""Validate a server, and go on after its operator restarted it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucm.validation.backups import BackupMonitor, metrics_counts
from ucm.validation.client import ServerError, SGLangClient
from ucm.validation.profile import ServerProfile
from ucm.validation.prompts import PromptSource
from ucm.validation.results import Continuation, PoolUsage, Report
from ucm.validation.scenario import Scenario, Settings
from ucm.validation.storage import StorageDirectory

if TYPE_CHECKING:
    from pathlib import Path

Say = Callable[[str], None]

_QUIET_S = 1.0
_BLIND_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the server does not say over HTTP.

    Args:
        selection: How the server got its backend: `patched`, `plugin` or `dynamic`; None: unknown.
        storage_roots: Where its pages lie, if visible from here; empty: where the server says.
        vocabulary: Token ids of prompts stay below this; None: as the model's configuration says.
        settle_s: How long nothing may arrive on storage before it counts as complete; if nothing can be
            watched, how long to wait. None: 1 and 10.
        deadline_s: How long to wait for missing pages.
    """

    selection: str | None = None
    storage_roots: Sequence[Path] = ()
    vocabulary: int | None = None
    settle_s: float | None = None
    deadline_s: float = 120.0


def validate(
    client: SGLangClient, settings: Settings, surroundings: Surroundings, *, seed: int, say: Say
) -> tuple[Report, Continuation]:
    """Drive a running server through the whole scenario.

    Raises:
        ServerError: The server cannot be validated.
        ValueError: It can, but not with these settings.
        NotADirectoryError: There is no such storage directory.
    """
    profile = read_profile(client)
    selection = surroundings.selection or _selection(profile.backend)
    directory = _directory(profile, surroundings)
    for line in _describe(profile, selection, directory):
        say(line)
    say(f"prompts: seed {seed}")
    scenario = Scenario(
        client, profile, settings, _monitor(client, profile, surroundings, directory, say), say
    )
    outcome = scenario.run(_prompts(profile, surroundings, seed))
    continuation = Continuation(
        model=profile.model,
        selection=selection,
        output_tokens=settings.output_tokens,
        phases=tuple(outcome.phases),
        subjects=outcome.subjects,
    )
    return _report(continuation, directory), continuation


def validate_after_restart(
    client: SGLangClient,
    earlier: Continuation,
    settings: Settings,
    surroundings: Surroundings,
    *,
    seed: int,
    say: Say,
) -> tuple[Report, Continuation]:
    """Send an earlier run's prompts to the restarted server; the earlier phases come first in the report.

    Raises:
        ServerError: The server cannot be validated.
    """
    profile = read_profile(client)
    if profile.model != earlier.model:
        raise ServerError(f"the report is about {earlier.model}, but the server serves {profile.model}")
    directory = _directory(profile, surroundings)
    for line in _describe(profile, earlier.selection, directory):
        say(line)
    settings = replace(settings, output_tokens=earlier.output_tokens)
    scenario = Scenario(
        client, profile, settings, _monitor(client, profile, surroundings, directory, say), say
    )
    outcome = scenario.after_restart(earlier.subjects, _prompts(profile, surroundings, seed))
    continuation = replace(earlier, phases=(*earlier.phases, *outcome.phases))
    return _report(continuation, directory), continuation


def read_profile(client: SGLangClient) -> ServerProfile:
    """Ask a server for its rules.

    Raises:
        ServerError: It has no HiCache storage, or does not say what is needed.
    """
    try:
        return ServerProfile.from_server(client.server_info(), client.model_info())
    except ValueError as error:
        raise ServerError(f"{client.url}: {error}") from error


def _prompts(profile: ServerProfile, surroundings: Surroundings, seed: int) -> PromptSource:
    return PromptSource(seed, surroundings.vocabulary or profile.vocabulary)


def _selection(backend: str) -> str:
    """Name the way of selection as far as the backend's name tells: patched and plugin look alike."""
    return "dynamic" if backend == "dynamic" else "unknown"


def _directory(profile: ServerProfile, surroundings: Surroundings) -> StorageDirectory | None:
    for root in surroundings.storage_roots:
        if not root.is_dir():
            raise NotADirectoryError(f"storage directory {root} does not exist")
    roots = surroundings.storage_roots or profile.storage_roots
    return StorageDirectory(roots) if roots and all(root.is_dir() for root in roots) else None


def _monitor(
    client: SGLangClient,
    profile: ServerProfile,
    surroundings: Surroundings,
    directory: StorageDirectory | None,
    say: Say,
) -> BackupMonitor:
    count = directory.pages if directory else metrics_counts(client, profile.page_tokens)
    settle_s = surroundings.settle_s
    if settle_s is None:
        settle_s = _QUIET_S if count else _BLIND_WAIT_S
    if count is None:
        say(
            f"neither a storage directory nor metrics to watch: waiting {settle_s:g} s for backups "
            "(--settle, --storage-dir, or start the server with --enable-metrics)"
        )
    return BackupMonitor(count, quiet_s=settle_s, deadline_s=surroundings.deadline_s, say=say)


def _describe(profile: ServerProfile, selection: str, directory: StorageDirectory | None) -> list[str]:
    lines = [
        f"model {profile.model}, page {profile.page_tokens} tokens, reusable prefixes end at multiples of "
        f"{profile.step_tokens}, L1 {profile.device_tokens} tokens, backend {profile.backend} ({selection})",
        f"storage: {', '.join(map(str, directory.roots)) if directory else 'not visible from here'}",
    ]
    if profile.write_policy != "write_through":
        lines.append(
            f"warning: --hicache-write-policy {profile.write_policy} stores late; "
            "expectations assume write_through"
        )
    if profile.prefetch_policy != "wait_complete":
        lines.append(
            f"warning: --hicache-storage-prefetch-policy {profile.prefetch_policy} may stop a restore early; "
            "expectations assume wait_complete"
        )
    return lines


def _report(continuation: Continuation, directory: StorageDirectory | None) -> Report:
    pools: tuple[PoolUsage, ...] = directory.pools() if directory else ()
    return Report(
        model=continuation.model, selection=continuation.selection, phases=continuation.phases, pools=pools
    )
