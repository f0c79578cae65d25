"""Partitions: a question to the index as a whole becomes one to each partition, and one answer.

Hosts of a partition are in no other, so what a host has is all in one answer: the longest prefix of
an engine needs no second one. Only a route does: any host tier of the fleet may be a peer, so their
parts of the question are gathered first. A partition without an answer is named in the reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
from kvbm_common.config.settings import Settings
from kvbm_common.copying.naming import NAMING
from kvbm_common.errors import ConfigError, DeadlineExceeded, KvbmError, RequestFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import Partitions
from kvbm_common.nats.verb_server import VerbHandler
from kvbm_common.registry.records import PARTITIONS_INFO, Left, RegistryEvent
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.index_verbs import DUMP_BLOCKS_MAX, DumpReply, DumpRequest, MatchReply
from kvbm_common.wire.partitions import INDEX_GROUP
from kvbm_common.wire.routes import LeftOut, RouteReply, RouteRequest
from kvbm_common.wire.scores import (
    BlockHolders,
    HoldersReply,
    MatchBatchReply,
    ScoreReply,
    WhereReply,
)
from kvbm_common.wire.verbs import verb_subject

from kvbm_index.core.partition_messages import PartitionRouteRequest, PeersReply
from kvbm_index.core.requests import BadRequest, ReplyTooLarge, decoded, encoded, hashes_of
from kvbm_index.core.routes import in_order, longest

ANSWER_DEADLINE_S = 0.5
"""Deadline for another partition."""
SILENT_DEADLINE_S = 0.05
"""The deadline for a partition that did not answer the last question, in seconds. An answer takes 1
ms as a rule, and a host tier waits 250 ms for the whole answer."""
HURRIED = frozenset({"match", "match_tokens", "match_batch", "score", "peers", "route"})
"""Lookups: requests of engines wait for the answers of these verbs."""
REFUSALS = frozenset({BadRequest.code, ReplyTooLarge.code})
"""A partition that refuses with these has understood the question: all would refuse it."""

Answer = TypeVar("Answer", bound=msgspec.Struct)
_dump_request: JsonCodec[DumpRequest] = JsonCodec(DumpRequest)
_route_request: JsonCodec[RouteRequest] = JsonCodec(RouteRequest)
_dump: JsonCodec[DumpReply] = JsonCodec(DumpReply)
_route: JsonCodec[RouteReply] = JsonCodec(RouteReply)
_peers: JsonCodec[PeersReply] = JsonCodec(PeersReply)

log = logging.getLogger(__name__)


def check_partition(settings: Settings) -> None:
    """Raise ConfigError where an index does not say which of several partitions is its own."""
    count, own = settings.index_partitions, settings.index_partition
    if (count > 1 and own is None) or (own or 0) >= count:
        accepted = f"0 to {count - 1}, since KVBM_INDEX_PARTITIONS is {count}"
        raise ConfigError("KVBM_INDEX_PARTITION", "" if own is None else own, accepted)


class Strangers:
    """Hosts whose events no index of these partitions reads: they publish for another number."""

    def __init__(self, partitions: Partitions, counters: Metrics) -> None:
        self._count = partitions.count
        self._keys: set[str] = set()
        self._log = OncePerKind(log)
        self._figure = counters.gauge(
            "kvbm_index_hosts_of_other_partitions",
            "Hosts that publish for another number of partitions: nothing of them is found.",
        )

    def take(self, event: RegistryEvent) -> None:
        """Take what the registry says of a consolidator, which publishes for a host's engines."""
        record = event.record
        said = record.info.get(PARTITIONS_INFO, 1)
        if isinstance(event, Left) or said == self._count:
            self._keys.discard(record.key)
        else:
            self._keys.add(record.key)
            text = f"{record.host} publishes for {said} partitions, and the index reads those of "
            self._log.warning("strangers", f"{text}{self._count}: set KVBM_INDEX_PARTITIONS alike")
        self._figure.set(len(self._keys))


class PartitionVerbs:
    """The verbs of the whole index, answered by a replica of one of its partitions."""

    def __init__(
        self,
        bus: Bus,
        partitions: Partitions,
        own: int,
        verbs: Mapping[str, VerbHandler],
        counters: Metrics,
        next_tie: Callable[[], bytes],
    ) -> None:
        """Answer from `verbs`, those of the partition `own`, and from the other partitions."""
        assert 0 <= own < partitions.count, f"partition {own} of {partitions.count}"
        self._bus, self._own, self._local, self._next_tie = bus, own, verbs, next_tie
        self._count = partitions.count
        self._log = OncePerKind(log)
        self._silent: set[int] = set()
        """Partitions that did not answer the last question in time."""
        self._late: dict[int, asyncio.Task[bytes]] = {}
        """For a silent partition, the question whose answer ends the silence."""
        self._answers = counters.gauge(
            "kvbm_index_partition_answers",
            "1: the partition answered this replica's last question.",
            labels=("partition",),
        )
        self._missed = counters.counter(
            "kvbm_index_partition_missing_total",
            "Answers of this replica in which the partition is missing.",
            labels=("partition",),
        )

    @property
    def verbs(self) -> dict[str, VerbHandler]:
        """The verbs by name."""
        merged: dict[str, VerbHandler] = {name: self._merged(name) for name in MERGES}
        return merged | {"route": self._route, "dump": self._dump}

    def _merged(self, name: str) -> VerbHandler:
        merge = MERGES[name]

        async def answer(payload: bytes) -> bytes:
            answers, missing = await self._ask_all(name, payload)
            return encoded(_with(merge(answers), missing))

        return answer

    async def _route(self, payload: bytes) -> bytes:
        request = decoded(_route_request, payload)
        hashes = hashes_of(request, NAMING.hasher)
        tie = hashes[-1] if hashes else self._next_tie()
        lost: list[int] = []
        parts = None
        if request.peer_weight:
            told, lost = await self._ask_all("peers", payload)
            found = (part for one in told for part in _peers.decode(one).parts)
            parts = longest(found)
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        asked = PartitionRouteRequest(**fields, peers=parts, tie=tie.hex())
        answers, missing = await self._ask_all("route", msgspec.json.encode(asked))
        replies = [_route.decode(one) for one in answers]
        engines = in_order((engine for one in replies for engine in one.engines), tie)
        left_out = list(_left_out(request, [one.left_out for one in replies]))
        reply = RouteReply(asked=len(hashes), engines=engines, left_out=left_out)
        return encoded(_with(reply, sorted({*lost, *missing})))

    async def _dump(self, payload: bytes) -> bytes:
        """Answer everything that is little, or a page: those of each partition after the other."""
        request = decoded(_dump_request, payload)
        if not request.limit and not request.after:
            answers, missing = await self._ask_all("dump", payload)
            holders = [one for reply in answers for one in _dump.decode(reply).holders]
            blocks = sum(len(one.hashes) for one in holders)
            if blocks > DUMP_BLOCKS_MAX:
                raise ReplyTooLarge(f"{blocks} blocks, more than {DUMP_BLOCKS_MAX}: ask in pages")
            holders.sort(key=lambda one: (one.host, one.source, one.tier, one.rank, one.group))
            return encoded(_with(DumpReply(holders=holders), missing))
        partition, after = _place_of(request.after, self._count)
        asked = msgspec.structs.replace(request, after=after)
        answers, missing = await self._ask((partition,), "dump", msgspec.json.encode(asked))
        page = _dump.decode(answers[0]) if answers else DumpReply(holders=[])
        if page.next or partition + 1 < self._count:
            place = f"{partition}:{page.next}" if page.next else f"{partition + 1}:"
            page = msgspec.structs.replace(page, next=place)
        return encoded(_with(page, missing))

    async def _ask_all(self, verb: str, payload: bytes) -> tuple[list[bytes], list[int]]:
        return await self._ask(range(self._count), verb, payload)

    async def _ask(
        self, partitions: Sequence[int], verb: str, payload: bytes
    ) -> tuple[list[bytes], list[int]]:
        """Return the answers of those that have answered, and who has not; raises a refusal."""
        asking = (self._ask_one(number, verb, payload) for number in partitions)
        answers = dict(zip(partitions, await asyncio.gather(*asking), strict=True))
        missing = [number for number, answer in answers.items() if answer is None]
        return [answer for answer in answers.values() if answer is not None], missing

    async def _ask_one(self, number: int, verb: str, payload: bytes) -> bytes | None:
        if number == self._own:
            return await self._local[verb](payload)
        subject = verb_subject(INDEX_GROUP, verb, host=str(self._count), instance=str(number))
        label = str(number)
        try:
            if verb in HURRIED and number in self._silent:
                answer = await self._hurried(number, subject, payload)
            else:
                answer = await self._request(number, subject, payload, ANSWER_DEADLINE_S)
        except KvbmError as error:
            if isinstance(error, RequestFailed) and error.code in REFUSALS:
                raise
            self._answers.labels(partition=label).set(0)
            self._missed.labels(partition=label).inc()
            self._log.warning(f"partition_{error.label}", f"partition {number}: {error}")
            return None
        self._answers.labels(partition=label).set(1)
        return answer

    async def _hurried(self, number: int, subject: str, payload: bytes) -> bytes:
        """Return what a silent partition answers at once; raises KvbmError.

        One question at a time is not given up then: a slow answer, too, ends the silence.
        """
        if number in self._late:
            return await self._request(number, subject, payload, SILENT_DEADLINE_S)
        asking = asyncio.create_task(self._request(number, subject, payload, ANSWER_DEADLINE_S))
        self._late[number] = asking
        asking.add_done_callback(lambda task: self._forget(number, task))
        await asyncio.wait((asking,), timeout=SILENT_DEADLINE_S)
        if not asking.done():
            raise DeadlineExceeded(f"silent, and no answer within {SILENT_DEADLINE_S} s")
        return asking.result()

    def _forget(self, number: int, task: asyncio.Task[bytes]) -> None:
        del self._late[number]
        if not task.cancelled():
            task.exception()  # It is known: nothing waits for it.

    async def _request(self, number: int, subject: str, payload: bytes, wait_s: float) -> bytes:
        """Ask a partition, and note whether it is silent; raises KvbmError."""
        try:
            answer = await self._bus.request(subject, payload, deadline_s=wait_s)
        except DeadlineExceeded:
            self._silent.add(number)
            raise
        self._silent.discard(number)
        return answer


def _with(reply: Answer, missing: Sequence[int]) -> Answer:
    """Return a reply that names the partitions that are not in it."""
    return msgspec.structs.replace(reply, missing=list(missing)) if missing else reply


def _place_of(after: str, count: int) -> tuple[int, str]:
    """Return the partition and its cursor, from a cursor over all; raises BadRequest."""
    number, colon, cursor = after.partition(":")
    if not after:
        return 0, ""
    if not (colon and number.isascii() and number.isdecimal() and int(number) < count):
        raise BadRequest("after is no `next` of a page", "after")
    return int(number), cursor


def _left_out(request: RouteRequest, told: Sequence[Sequence[LeftOut]]) -> Iterator[LeftOut]:
    """Yield who is left out: an engine is unknown where no partition knows it."""
    named = {(load.host, load.source) for load in request.engines}
    unknown = [
        Counter((one.host, one.source) for one in left_out if one.reason == "unknown")
        for left_out in told
    ]
    for key in unknown[0] if unknown else ():
        if key in named:
            for _ in range(min(counts[key] for counts in unknown)):
                yield LeftOut(host=key[0], source=key[1], reason="unknown")
    for left_out in told:
        for one in left_out:
            if one.reason != "unknown" or (one.host, one.source) not in named:
                yield one


def _merge_matches(replies: Sequence[MatchReply]) -> MatchReply:
    matches = sorted(
        (one for reply in replies for one in reply.matches),
        key=lambda one: (-one.blocks, one.host, one.source, one.tier, one.rank, one.group),
    )
    return MatchReply(asked=replies[0].asked, matches=matches)


_match: JsonCodec[MatchReply] = JsonCodec(MatchReply)
_batch: JsonCodec[MatchBatchReply] = JsonCodec(MatchBatchReply)
_score: JsonCodec[ScoreReply] = JsonCodec(ScoreReply)
_where: JsonCodec[WhereReply] = JsonCodec(WhereReply)
_holders: JsonCodec[HoldersReply] = JsonCodec(HoldersReply)


def _matched(answers: Iterable[bytes]) -> MatchReply:
    return _merge_matches([_match.decode(one) for one in answers])


def _matched_batch(answers: Iterable[bytes]) -> MatchBatchReply:
    replies = (_batch.decode(one).replies for one in answers)
    return MatchBatchReply(replies=[_merge_matches(one) for one in zip(*replies, strict=True)])


def _scored(answers: Iterable[bytes]) -> ScoreReply:
    replies = [_score.decode(one) for one in answers]
    scores = sorted(
        (one for reply in replies for one in reply.scores),
        key=lambda one: (-one.score, one.host, one.source, one.rank),
    )
    return ScoreReply(asked=replies[0].asked, scores=scores)


def _found(answers: Iterable[bytes]) -> WhereReply:
    replies = (_where.decode(one).blocks for one in answers)
    blocks = [
        BlockHolders(hash=same[0].hash, holders=[one for block in same for one in block.holders])
        for same in zip(*replies, strict=True)
    ]
    return WhereReply(blocks=blocks)


def _held(answers: Iterable[bytes]) -> HoldersReply:
    holders = sorted(
        (one for answer in answers for one in _holders.decode(answer).holders),
        key=lambda one: (one.host, one.source, one.tier, one.rank, one.group),
    )
    return HoldersReply(holders=holders)


MERGES: Mapping[str, Callable[[Iterable[bytes]], msgspec.Struct]] = {
    "match": _matched,
    "match_tokens": _matched,
    "match_batch": _matched_batch,
    "score": _scored,
    "where": _found,
    "holders": _held,
}
