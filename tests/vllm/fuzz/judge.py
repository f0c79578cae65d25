"""Rules of comparison: is an answer that of vLLM alone, up to the rounding of another batch?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.vllm.fuzz.talk import Answer, Spoken

ROUNDING = 2e-3
"""Of a logprob, between batches; wrong KV moves them by whole digits."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must not be."""

    kind: str
    text: str
    request: str = ""


def differences(
    found: Answer, wanted: Answer, *, aborted: bool = False, rounding: float = ROUNDING
) -> tuple[list[Failure], int]:
    """What is wrong about an answer, and how many near ties went the other way.

    `rounding` is how far logprobs may be apart: farther in bfloat16.
    """
    failures: list[Failure] = []
    ties = 0
    for one, other in zip(found.spoken, wanted.spoken, strict=False):
        kind, text, tie = _difference(one, other, rounding, aborted=aborted)
        ties += tie
        if kind:
            failures.append(Failure(kind=kind, text=text, request=found.name))
    if len(found.spoken) != len(wanted.spoken) and not aborted:
        text = f"{len(found.spoken)} answers instead of {len(wanted.spoken)}"
        failures.append(Failure(kind="finish", text=text, request=found.name))
    is_told = found.prompt_logprobs or (wanted.prompt_logprobs and not aborted)
    if is_told and not _close(found.prompt_logprobs, wanted.prompt_logprobs, rounding):
        failures.append(Failure(kind="prompt logprobs", text="differ", request=found.name))
    return failures, ties


def _difference(
    found: Spoken, wanted: Spoken, rounding: float, *, aborted: bool
) -> tuple[str, str, int]:
    if found.finish == "stuck":
        return "stuck", f"it had not ended after {len(found.tokens)} tokens", 0
    if found.finish != wanted.finish and not (aborted and found.finish == "abort"):
        return "finish", f"ends in {found.finish}, not {wanted.finish}", 0
    for index, token in enumerate(found.tokens):
        if index >= len(wanted.tokens):
            return "tokens", f"{len(found.tokens)} tokens instead of {len(wanted.tokens)}", 0
        ours, theirs = found.logprobs[index], wanted.logprobs[index]
        near = ours is not None and theirs is not None and abs(ours - theirs) < rounding
        if token != wanted.tokens[index]:
            if near:
                return "", "", 1  # What follows is another text.
            return "tokens", f"token {index} is {token} ({ours}), not " + (
                f"{wanted.tokens[index]} ({theirs})"), 0  # fmt: skip
        if not near and ours != theirs:
            return "logprobs", f"that of token {index} is {ours}, not {theirs}", 0
    if len(found.tokens) < len(wanted.tokens) and found.finish != "abort":
        return "tokens", f"{len(found.tokens)} tokens instead of {len(wanted.tokens)}", 0
    return "", "", 0


def _close(found: Sequence[float | None], wanted: Sequence[float | None], rounding: float) -> bool:
    if len(found) != len(wanted):
        return False
    return all(
        x == y if x is None or y is None else abs(x - y) < rounding
        for x, y in zip(found, wanted, strict=True)
    )
