"""Operations of the admin routes: ask many instances at once, or step after step in a job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from kvbm_common.errors import KvbmError, RequestFailed
from kvbm_common.identity import Hasher, request_extras
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.wire.admin import (
    PREFETCH_DEADLINE_MS_MAX,
    STEP_BLOCKS_MAX,
    BlockReply,
    BlockRequest,
    PinsReply,
    PinsRequest,
    PrefetchReply,
    PrefetchRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.operator_verbs import OperatorVerb
from kvbm_common.wire.scores import BlockHolder

from kvbm_metrics.core.admin_models import (
    BlockStoryView,
    OutcomeView,
    PinsView,
    PinView,
    PlacedBlockView,
    PrefetchQuery,
)
from kvbm_metrics.core.collector import TIER_OF_KIND
from kvbm_metrics.core.models import BlockHolderView
from kvbm_metrics.shell.fleet import Fleet, Reply
from kvbm_metrics.shell.jobs import Job, Progress, Work

PREFETCH_STEP_BLOCKS = 256
"""At 2 MiB a block half a GiB: a disk brings it within the deadline of one request."""
SETTLE_S, DELETES_MAX_S = 10.0, 1800.0
"""Seconds of further rounds of a reset, under traffic, and while a bucket goes on deleting."""
ROUND_PAUSE_S = 1.0
"""The time before a further round of a reset: a write that is under way ends in it."""
UNDELETED = "undeleted"
"""The error of a tier whose bucket has objects to delete still."""
IDLE_TURNS_MAX = 1_000
"""A tier of ten million blocks looks at all of them in a tenth of these turns."""

_any: JsonCodec[dict[str, Any]] = JsonCodec(dict[str, Any])
_block: JsonCodec[BlockReply] = JsonCodec(BlockReply)
_pins: JsonCodec[PinsReply] = JsonCodec(PinsReply)
_remove: JsonCodec[RemoveReply] = JsonCodec(RemoveReply)
_resize: JsonCodec[ResizeReply] = JsonCodec(ResizeReply)
_prefetch: JsonCodec[PrefetchReply] = JsonCodec(PrefetchReply)


class UnknownInstance(KvbmError):
    """No registered service is meant by that."""

    code = "unknown_instance"


class NoProgress(KvbmError):
    """A tier says again and again that there is more to remove, and removes nothing."""

    code = "no_progress"


def targets(
    records: Sequence[ServiceRecord],
    *,
    kinds: Sequence[str],
    host: str | None,
    instance: str | None,
) -> list[ServiceRecord]:
    """Return the instances that are meant; raises UnknownInstance when there are none."""
    found = meant(records, kinds=kinds, host=host, instance=instance)
    if not found:
        where = f" {instance or '*'} on {host or '*'}" if host or instance else ""
        raise UnknownInstance(f"no {' or '.join(kinds)}{where} is registered")
    return found


def meant(
    records: Sequence[ServiceRecord],
    *,
    kinds: Sequence[str],
    host: str | None,
    instance: str | None,
) -> list[ServiceRecord]:
    """Return the instances of these kinds, of a host or all, with a name or all."""
    return [
        record
        for record in records
        if record.kind in kinds
        and host in (None, record.host)
        and instance in (None, record.instance)
    ]


def kinds_of(verb: OperatorVerb, given: Mapping[str, Any]) -> list[str]:
    """Return the services that are meant, of those that answer the verb."""
    tier = given.get("tier", "all")
    if kind := given.get("kind"):
        return [kind]
    return [one for one in verb.answered_by if tier in (TIER_OF_KIND.get(one), "all")]


async def change(
    fleet: Fleet, records: Sequence[ServiceRecord], verb: str, request: msgspec.Struct
) -> list[OutcomeView]:
    """Ask all of them at once; what each has answered."""

    async def one(record: ServiceRecord) -> OutcomeView:
        named: Mapping[str, Any] = _named(record)
        try:
            reply = await fleet.ask_instance(record, verb, request, _any)
        except KvbmError as error:
            return OutcomeView(**named, ok=False, code=error.code, message=error.text)
        reply.pop("v", None)
        return OutcomeView(**named, ok=True, reply=reply)

    return list(await asyncio.gather(*map(one, records)))


def _told(error: KvbmError) -> str:
    """Return a failure with its code, which the text of an instance's refusal has already."""
    return f"{error.code}: {str(error).removeprefix(f'{error.code}: ')}"


# --- jobs -----------------------------------------------------------------------------------


def removing(
    fleet: Fleet, records: Sequence[ServiceRecord], verb: str, whole: RemoveRequest
) -> Work:
    """Return the work of `evict` and `reset`.

    It asks each instance in steps until nothing is left to remove: a tier before those below it,
    which take its blocks. Blocks were on their way into a tier when its turn came: `reset` asks all
    again until a round removes nothing and no bucket has objects to delete, and counts what they
    bring as `arrived`. An instance that refuses one part of the hashes is asked for the others.
    """
    parts = [None] if whole.hashes is None else _parts(whole.hashes, STEP_BLOCKS_MAX)
    order = [*TIER_OF_KIND]
    downwards = sorted(records, key=lambda one: order.index(one.kind))
    undeleted: dict[str, str] = {}

    async def round_of(job: Job, tally: Counter[str]) -> AsyncGenerator[Progress, None]:
        tally["kept"] = tally["missing"] = 0
        undeleted.clear()
        for record in downwards:
            if record.key in job.errors:
                continue
            for part in parts:
                request = msgspec.structs.replace(whole, hashes=part, job=job.id)
                try:
                    async for reply in _steps(fleet, record, verb, request):
                        tally["removed"] += reply.removed
                        if not reply.more:
                            tally["kept"] += reply.kept
                            tally["missing"] += len(reply.missing)
                        yield tally
                except KvbmError as error:
                    found = undeleted if error.code == UNDELETED else job.errors
                    found[record.key] = _told(error)
                    yield tally  # A job that is stopped ends here.
                    if not isinstance(error, RequestFailed):
                        break  # What does not answer is not asked for the other parts.

    async def work(job: Job) -> AsyncGenerator[Progress, None]:
        tally: Counter[str] = Counter(removed=0, kept=0, missing=0)
        async for progress in round_of(job, tally):
            yield progress
        if verb != "reset":
            return
        first, missing = tally["removed"], tally["missing"]
        until_s, removed, tally["arrived"] = time.monotonic() + SETTLE_S, -1, 0
        last_s = time.monotonic() + DELETES_MAX_S
        while (removed != tally["removed"] or undeleted) and time.monotonic() < until_s:
            await asyncio.sleep(ROUND_PAUSE_S)
            removed, waited = tally["removed"], dict(undeleted)
            async for progress in round_of(job, tally):
                tally["arrived"], tally["missing"] = tally["removed"] - first, missing
                yield progress
            if undeleted and undeleted != waited:  # A bucket deletes 1,000 objects at a time.
                until_s = min(last_s, time.monotonic() + SETTLE_S)
        job.errors |= undeleted
        yield tally

    return work


async def _steps(
    fleet: Fleet, record: ServiceRecord, verb: str, request: RemoveRequest
) -> AsyncGenerator[RemoveReply, None]:
    """Ask one instance until there is no more to remove; raises KvbmError."""
    more, idle = True, 0
    while more:
        reply = await fleet.ask_instance(record, verb, request, _remove)
        idle = 0 if reply.removed else idle + 1  # A tier looks through many blocks in turns.
        more = reply.more
        if more and idle >= IDLE_TURNS_MAX:
            raise NoProgress(f"nothing was removed in {idle} turns")
        yield reply


SILENCE = (
    "lost: it went silent, and what it holds is not removed; tiers that answer are reset. If it is "
    "gone for good, `kvbm forget {host}` leaves it out"
)
RESTART = "left: it may be starting again, with what it holds; ask again in half a minute"


def with_lost(
    work: Work, lost: Sequence[ServiceRecord], restarting: Sequence[ServiceRecord] = ()
) -> Work:
    """Return the work of a reset that fails for instances which may come back with their blocks."""

    async def whole(job: Job) -> AsyncGenerator[Progress, None]:
        said = (*((one, RESTART) for one in restarting), *((one, SILENCE) for one in lost))
        job.errors |= {record.key: text.format(host=record.host) for record, text in said}
        async with contextlib.aclosing(work(job)) as steps:
            async for progress in steps:
                yield progress

    return whole


def resizing(
    fleet: Fleet, records: Sequence[ServiceRecord], verb: str, request: ResizeRequest
) -> Work:
    """Return the work of `resize`.

    It asks each instance in steps until it is small enough, or stays larger.
    """

    async def work(job: Job) -> AsyncGenerator[Progress, None]:
        tally: Counter[str] = Counter(slots=0, evicted=0)
        for record in records:
            more, step = True, request
            while more:
                try:
                    reply = await fleet.ask_instance(record, verb, step, _resize)
                except KvbmError as error:
                    job.errors[record.key] = _told(error)
                    yield tally
                    break
                # Without progress the same step would be repeated without end.
                more = reply.more and (reply.evicted > 0 or reply.slots != reply.was)
                step = msgspec.structs.replace(request, goes_on=True)
                tally["evicted"] += reply.evicted
                yield tally
            else:
                tally["slots"] += reply.slots
                if reply.slots > request.slots:
                    kept = reply.slots - request.slots
                    job.errors[record.key] = f"in_use: {kept} slots more are in use; ask again"
                yield tally

    return work


def prefetching(
    fleet: Fleet, records: Sequence[ServiceRecord], query: PrefetchQuery, actor: str
) -> Work:
    """Return the work of `prefetch`.

    It asks each host tier in steps, until a step finds the end of the run. Each step names the run
    from its beginning: a later part would push out an earlier one, without which it is of no use.
    """
    names = _names_of(query)

    async def work(job: Job) -> AsyncGenerator[Progress, None]:
        tally: Counter[str] = Counter(blocks=0, filled=0)
        for record in records:
            before, end, reason = tally["blocks"], 0, ""
            while end < len(names) and not reason:
                end = min(end + PREFETCH_STEP_BLOCKS, len(names))
                request = PrefetchRequest(
                    hashes=names[:end], deadline_ms=PREFETCH_DEADLINE_MS_MAX, actor=actor
                )
                try:
                    reply = await fleet.ask_instance(record, "prefetch", request, _prefetch)
                except KvbmError as error:
                    job.errors[record.key] = _told(error)
                    yield tally
                    break
                tally["blocks"] = before + reply.blocks
                tally["filled"] += reply.filled
                if reply.blocks < end:
                    reason = reply.reason or "unknown"
                    if reason != "not_stored":  # The others are on no tier: there is no more to do.
                        text = f"{reply.blocks} of {len(names)} blocks are in host memory"
                        job.errors[record.key] = f"{reason}: {text}"
                yield tally

    return work


WORK: Mapping[str, Callable[[Fleet, Sequence[ServiceRecord], str, Any], Work]] = {
    "evict": removing,
    "reset": removing,
    "resize": resizing,
}
"""The steps of the verbs that are jobs."""


def _parts(hashes: list[str], size: int) -> list[list[str]]:
    return [hashes[start : start + size] for start in range(0, len(hashes), size)]


def _names_of(query: PrefetchQuery) -> list[str]:
    """Return the run as hashes, each once; raises IdentityError."""
    if query.hashes is not None:
        return list(dict.fromkeys(query.hashes))
    assert query.tokens is not None
    assert query.namespace is not None
    namespace = query.namespace.to_namespace()
    whole = len(query.tokens) // namespace.block_tokens * namespace.block_tokens
    extras = request_extras(lora=query.lora, salt=query.salt)
    return [name.hex() for name in Hasher(namespace).chain(query.tokens[:whole], extras=extras)]


# --- questions to all tiers -----------------------------------------------------------------


async def block_story(
    fleet: Fleet,
    records: Sequence[ServiceRecord],
    holders: Sequence[BlockHolder],
    name: str,
) -> BlockStoryView | None:
    """Return what the index and every tier know of a block; None: no service knows it."""
    answers, silent = await ask_all(fleet, records, "block", BlockRequest(hash=name), _block)
    tiers = [_placed(record, reply) for record, reply in answers if reply.held or reply.story]
    if not holders and not tiers and not silent:
        return None
    return BlockStoryView(
        hash=name,
        holders=[BlockHolderView(**msgspec.structs.asdict(one)) for one in holders],
        tiers=tiers,
        silent=silent,
    )


async def all_pins(fleet: Fleet, records: Sequence[ServiceRecord]) -> PinsView:
    """Return the pins of all tiers, and the tiers that did not answer."""
    answers, silent = await ask_all(fleet, records, "pins", PinsRequest(), _pins)
    pins = [
        PinView(**_named(record), tier=TIER_OF_KIND[record.kind], **msgspec.structs.asdict(pin))
        for record, reply in answers
        for pin in reply.pins
    ]
    return PinsView(pins=pins, silent=silent)


async def ask_all(
    fleet: Fleet,
    records: Sequence[ServiceRecord],
    verb: str,
    request: msgspec.Struct,
    codec: JsonCodec[Reply],
) -> tuple[list[tuple[ServiceRecord, Reply]], list[str]]:
    """Ask every instance; return the answers, and which did not answer and why."""
    silent: list[str] = []

    async def one(record: ServiceRecord) -> Reply | None:
        try:
            return await fleet.ask_instance(record, verb, request, codec)
        except KvbmError as error:
            silent.append(f"{record.key}: {error.code}")
            return None

    replies = await asyncio.gather(*map(one, records))
    pairs = zip(records, replies, strict=True)
    return [(record, reply) for record, reply in pairs if reply is not None], sorted(silent)


def _placed(record: ServiceRecord, reply: BlockReply) -> PlacedBlockView:
    told = msgspec.to_builtins(reply)
    del told["v"]
    told["checksum"] = f"{reply.checksum:016x}" if reply.held else ""
    told["part_checksums"] = [f"{checksum:016x}" for checksum in reply.part_checksums]
    if not reply.held:
        told["parent"] = told["namespace"] = ""
    return PlacedBlockView(**_named(record), tier=TIER_OF_KIND[record.kind], **told)


def _named(record: ServiceRecord) -> dict[str, Any]:
    return {"kind": record.kind, "host": record.host, "instance": record.instance}
