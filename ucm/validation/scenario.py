# SPDX-License-Identifier: MIT
"""The sequence of requests that shows every tier of a server's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucm.validation.results import Answer, CachedTokens, Phase, Subject, sum_cached

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.validation.backups import BackupMonitor
    from ucm.validation.client import Reply, SGLangClient
    from ucm.validation.profile import ServerProfile
    from ucm.validation.prompts import PromptSource

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to drive a server, and what counts as met.

    Args:
        prompt_tokens: Length of the base prompt; None: a short one that storage can restore.
        output_tokens: Tokens generated, and compared, per answer.
        at_once: Prompts sent concurrently; 0 leaves these phases out.
        expect_fraction: Share of the expected tokens that must be reused.
        logprob_tolerance: Largest accepted difference to the reference answer.
        same_tokens: Whether an answer must have the reference's tokens; if not, logprobs are compared up to
            the first token that differs.
        max_filler_tokens: Leave the L2 phase out if filling L1 takes more tokens than this.
    """

    prompt_tokens: int | None = None
    output_tokens: int = 8
    at_once: int = 4
    expect_fraction: float = 1.0
    logprob_tolerance: float = 1e-5
    same_tokens: bool = True
    max_filler_tokens: int = 200_000


@dataclass(slots=True)
class Outcome:
    """Phases in the order they ran, and the prompts that a restarted server must still restore."""

    phases: list[Phase] = field(default_factory=list)
    subjects: dict[str, tuple[Subject, ...]] = field(default_factory=dict)


class Scenario:
    """Drive one server. Each public method runs some phases and adds them to `outcome`.

    Raises:
        ValueError: Prompts of the wanted length cannot show what they should on this server.
    """

    def __init__(
        self,
        client: SGLangClient,
        profile: ServerProfile,
        settings: Settings,
        backups: BackupMonitor,
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._profile = profile
        self._settings = settings
        self._backups = backups
        self._say = say
        self._prompt_tokens = settings.prompt_tokens or profile.default_prompt_tokens()
        self._check_prompt_tokens()
        self.outcome = Outcome()

    def run(self, prompts: PromptSource) -> Outcome:
        """Run everything that needs no restart, then wait until all of it is stored."""
        self.warm_up(prompts)
        base = prompts.take(self._prompt_tokens)
        self.one_prompt(base, prompts)
        self.longer_prompt(base, prompts)
        self.conversation(prompts)
        if self._settings.at_once:
            self.prompts_at_once(prompts)
        self._say("waiting for the last backups")
        self._backups.settle()
        return self.outcome

    def warm_up(self, prompts: PromptSource) -> None:
        """Make the server load what it postponed to its first request, so that no phase is timed with it."""
        self._say("warming up")
        self._client.generate(prompts.take(2 * self._profile.page_tokens), output_tokens=2)

    def one_prompt(self, base: Prompt, prompts: PromptSource) -> None:
        """Send one prompt cold, from L1, from L2, and from L3."""
        length = len(base)
        tokens = self._profile.restorable_tokens(length, length)
        (answer,) = self._reference("cold", [base])
        self._measure("warm-l1", [base], [answer], CachedTokens(device=tokens))
        if self._evict_to_host(prompts):
            self._measure("evicted-l2", [base], [answer], CachedTokens(host=tokens))
        tokens = self._profile.storage_tokens(length, length)
        self._flush()
        self._measure("flushed-l3", [base], [answer], CachedTokens(storage=tokens))
        self._remember("restart", [base], [answer])

    def longer_prompt(self, base: Prompt, prompts: PromptSource) -> None:
        """Send a prompt that starts like a stored one, from L3."""
        longer = base + prompts.take(self._profile.step_tokens + len(base) % self._profile.step_tokens)
        self._flush()
        expected = self._profile.storage_tokens(len(base), len(longer))
        answer = self._measure_then_recompute("longer-l3", longer, len(base), CachedTokens(storage=expected))
        self._remember("restart-longer", [longer], [answer])

    def conversation(self, prompts: PromptSource) -> None:
        """Send three turns, each with all that was said before: cold, from L1, from L3."""
        first = prompts.take(self._prompt_tokens)
        (answer,) = self._reference("turn-1-cold", [first])
        second = first + answer.tokens + prompts.take(self._profile.step_tokens)
        expected = self._profile.restorable_tokens(len(first), len(second))
        answer = self._measure_then_recompute("turn-2-l1", second, len(first), CachedTokens(device=expected))
        third = second + answer.tokens + prompts.take(self._profile.step_tokens)
        self._flush()
        expected = self._profile.storage_tokens(len(second), len(third))
        answer = self._measure_then_recompute("turn-3-l3", third, len(second), CachedTokens(storage=expected))
        self._remember("restart-turn-3", [third], [answer])

    def prompts_at_once(self, prompts: PromptSource) -> None:
        """Send several prompts concurrently, cold and from L3."""
        batch = [prompts.take(self._prompt_tokens) for _ in range(self._settings.at_once)]
        answers = self._reference("at-once-cold", batch)
        self._flush()
        expected = sum(self._profile.storage_tokens(len(prompt), len(prompt)) for prompt in batch)
        self._measure("at-once-l3", batch, answers, CachedTokens(storage=expected))
        self._remember("restart-at-once", batch, answers)

    def after_restart(self, subjects: dict[str, tuple[Subject, ...]], prompts: PromptSource) -> Outcome:
        """Send the stored prompts of an earlier run to a server that has just started."""
        self.warm_up(prompts)
        for number, (name, entries) in enumerate(subjects.items()):
            if number:
                # One prompt starts like another, and must not find that in L1.
                self._client.flush_cache()
            expected = sum(subject.restorable_tokens for subject in entries)
            stored, answers = [entry.prompt for entry in entries], [entry.answer for entry in entries]
            self._measure(name, stored, answers, CachedTokens(storage=expected))
        return self.outcome

    def _check_prompt_tokens(self) -> None:
        length, profile = self._prompt_tokens, self._profile
        if not profile.storage_tokens(length, length):
            raise ValueError(
                f"a prompt of {length} tokens leaves nothing on storage that a second one can restore "
                f"(page {profile.page_tokens}, prefetch threshold {profile.threshold_tokens} tokens); "
                f"{profile.default_prompt_tokens()} would do"
            )
        # What the conversation adds to the first prompt.
        longest = length + 2 * (profile.step_tokens + self._settings.output_tokens)
        limit = min(profile.max_prompt_tokens, profile.device_tokens)
        if longest > limit:
            raise ValueError(
                f"prompts grow from {length} to {longest} tokens, but the server takes at most {limit}"
            )

    def _reference(self, name: str, prompts: Sequence[Prompt]) -> list[Answer]:
        """Compute prompts nobody has sent before, and return their answers."""
        replies = self._send(name, prompts)
        cached = sum_cached(reply.cached for reply in replies)
        problems = [f"{cached.total} tokens of a new prompt came from a cache"] if cached.total else []
        self._add(name, prompts, replies, CachedTokens(), problems)
        for prompt, reply in zip(prompts, replies, strict=True):
            self._expect_pages(len(prompt), reply.cached.total)
        return [reply.answer for reply in replies]

    def _measure(
        self, name: str, prompts: Sequence[Prompt], answers: Sequence[Answer], expected: CachedTokens
    ) -> None:
        """Send prompts whose answers are known."""
        replies = self._send(name, prompts)
        self._judge(name, prompts, replies, answers, expected)

    def _measure_then_recompute(
        self, name: str, prompt: Prompt, stored_tokens: int, expected: CachedTokens
    ) -> Answer:
        """Send a prompt whose first tokens are stored, then compute its reference answer uncached."""
        (reply,) = self._send(name, [prompt])
        self._expect_pages(len(prompt), max(stored_tokens, reply.cached.total))
        self._say(f"{name}: computing the reference answer without the cache")
        reference = self._client.generate(
            prompt, output_tokens=self._settings.output_tokens, use_cache=False
        ).answer
        self._judge(name, [prompt], [reply], [reference], expected)
        return reference

    def _judge(
        self,
        name: str,
        prompts: Sequence[Prompt],
        replies: Sequence[Reply],
        answers: Sequence[Answer],
        expected: CachedTokens,
    ) -> None:
        problems = _shortfalls(
            sum_cached(reply.cached for reply in replies), expected, self._settings.expect_fraction
        )
        delta = 0.0
        for reply, answer in zip(replies, answers, strict=True):
            delta = max(delta, answer.max_abs_logprob_delta(reply.answer))
            position = answer.first_difference(reply.answer)
            if position is not None and self._settings.same_tokens:
                problems.append(f"the answer differs from the uncached one at token {position}")
        if delta > self._settings.logprob_tolerance:
            problems.append(
                f"logprobs differ by {delta:.3g} from the uncached answer, "
                f"more than {self._settings.logprob_tolerance:.3g}"
            )
        self._add(name, prompts, replies, expected, problems, delta)

    def _add(
        self,
        name: str,
        prompts: Sequence[Prompt],
        replies: Sequence[Reply],
        expected: CachedTokens,
        problems: Sequence[str],
        delta: float = 0.0,
    ) -> None:
        phase = Phase(
            name=name,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            cached=sum_cached(reply.cached for reply in replies),
            expected=expected,
            max_abs_logprob_delta=delta,
            ttft_s=max(reply.ttft_s for reply in replies),
            problems=tuple(problems),
        )
        self.outcome.phases.append(phase)
        cached = phase.cached
        self._say(
            f"{name}: {phase.prompt_tokens} prompt tokens, cached device {cached.device} host {cached.host} "
            f"storage {cached.storage}, {phase.ttft_s:.2f} s to the first token"
        )
        for problem in problems:
            self._say(f"{name}: NOT AS EXPECTED: {problem}")

    def _send(self, name: str, prompts: Sequence[Prompt]) -> list[Reply]:
        self._say(f"{name}: sending {sum(len(prompt) for prompt in prompts)} tokens")
        return self._client.generate_at_once(prompts, output_tokens=self._settings.output_tokens)

    def _expect_pages(self, prompt_tokens: int, already_stored_tokens: int) -> None:
        new_tokens = self._profile.stored_tokens(prompt_tokens) - self._profile.stored_tokens(
            already_stored_tokens
        )
        self._backups.expect(new_tokens // self._profile.page_tokens)

    def _remember(self, name: str, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> None:
        self.outcome.subjects[name] = tuple(
            Subject(
                prompt=prompt,
                restorable_tokens=self._profile.storage_tokens(len(prompt), len(prompt)),
                answer=answer,
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        )

    def _flush(self) -> None:
        self._say("waiting for backups, then flushing L1 and L2")
        self._backups.settle()
        self._client.flush_cache()

    def _evict_to_host(self, prompts: PromptSource) -> bool:
        """Fill L1 with other prompts; False if that would take too many tokens.

        SGLang evicts the least recently used first: once other prompts fill L1, nothing older is left.
        """
        profile = self._profile
        # A tenth more than fits, because what is not a whole page of a prompt is not kept.
        needed = profile.device_tokens + profile.device_tokens // 10
        if needed > self._settings.max_filler_tokens:
            self._say(
                f"evicted-l2: left out, filling L1 takes {needed} tokens "
                f"(--max-filler-tokens {self._settings.max_filler_tokens})"
            )
            return False
        longest = min(profile.device_tokens // 4, profile.max_prompt_tokens - 1)
        # Whole steps plus one token: all of a filler but that token stays in L1.
        length = max(profile.stored_tokens(longest - 1), profile.step_tokens) + 1
        count = -(-needed // (length - 1))
        self._say(f"evicted-l2: pushing the prompt out of L1 with {count} prompts of {length} tokens")
        for number in range(count):
            reply = self._client.generate(prompts.take(length), output_tokens=1)
            self._expect_pages(length, reply.cached.total)
            if (number + 1) % 10 == 0:
                self._say(f"evicted-l2: {number + 1} of {count}")
        return True


def _shortfalls(cached: CachedTokens, expected: CachedTokens, fraction: float) -> list[str]:
    """Say in words what is missing, tier by tier."""
    return [
        f"{tier} gave {got} tokens, expected {want}"
        for tier, got, want in (
            ("device", cached.device, expected.device),
            ("host", cached.host, expected.host),
            ("storage", cached.storage, expected.storage),
        )
        if got < want * fraction
    ]
