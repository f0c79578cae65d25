"""Blocks of several ranks: every part keeps its own checksum, wherever the block comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kvbm_common.checksum import SUM_BYTES, combined_checksum, pack_sums
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.parts import PARTS_MAX
from kvbm_common.wire.admin import BlockReply, BlockRequest
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local import Found, Welcome, from_host_tier
from kvbm_common.wire.slot_entries import FilledSlot, LeasedSlot
from kvbm_common.wire.verbs import FillReply
from kvbm_host_tier.core import answers
from kvbm_host_tier.core.messages import (
    AdminAsked,
    Answer,
    AskFill,
    AttachPeer,
    FillDone,
    PeerAttached,
    StartPull,
)
from kvbm_host_tier.core.peer_messages import PeerPulled, PulledBlock
from kvbm_host_tier.shell.peer_client import readable

from tests.services.host_tier.helpers import (
    BLOCK_BYTES,
    DIGEST,
    Host,
    hello,
    name,
    of,
    part_sums,
)
from tests.services.host_tier.peer_helpers import HostWithPeers, leased

RANKS = 2


def host_of_two(kind: type[Host] = Host, **kwargs: Any) -> Any:
    """A host tier with an engine of two ranks."""
    host = kind(attach=False, **kwargs)
    host.attach(world_size=RANKS)
    return host


def sums(*wanted: int) -> bytes:
    """The packed checksums of both parts of each block."""
    return pack_sums(one for number in wanted for one in part_sums(number, RANKS))


def checksum(number: int) -> int:
    """Of a block of two parts."""
    return combined_checksum(sums(number))


def filled(fill: AskFill, **changes: Any) -> FillDone:
    """The disk tier has read all that was asked for; `changes` to each answer."""
    slots = []
    for asked in fill.request.slots:
        number = int(asked.hash, 16)
        values: dict[str, Any] = {
            "hash": asked.hash, "slot": asked.slot, "ok": True, "parent": name(number - 1).hex(),
            "namespace": DIGEST, "checksum": checksum(number), "bytes": RANKS * BLOCK_BYTES,
            "parts": RANKS, "part_sums": sums(number),
        }  # fmt: skip
        slots.append(FilledSlot(**(values | changes)))
    return FillDone(fill.fill, FillReply(slots=slots))


def found_in(effects: Sequence[object]) -> Found:
    """The one answer to a lookup."""
    [found] = of(Host.told(effects), Found)  # type: ignore[arg-type]
    return found


# --- where blocks come from -------------------------------------------------------------------


def test_an_offload_keeps_the_checksum_of_each_part() -> None:
    """The pull tells them rank by rank; the lookup says them block after block."""
    host = host_of_two()
    [pull] = of(host.offer(1, 2, offer=70), StartPull)
    assert [part.share.parts for part in pull.parts] == [(0,), (1,)]
    host.pulled(pull)
    host.confirm(70)
    found = host.found(host.look_up(1, 2))
    assert found.checksums == [checksum(1), checksum(2)]
    assert found.part_sums == sums(1, 2)
    [slot] = host.lease(2).slots
    assert (slot.checksum, slot.parts) == (checksum(2), RANKS)


@pytest.mark.parametrize("groups", [[], [GroupRun(4, 3), GroupRun(4, 3, 1)]], ids=["", "groups"])
def test_an_answer_ends_where_a_message_does(
    monkeypatch: pytest.MonkeyPatch, groups: list[GroupRun]
) -> None:
    """Goal: no answer costs an engine its connection. Two blocks of two parts fill a message; over
    two groups, the hits of two blocks and of one boundary."""
    entry_bytes = answers.ENTRY_BYTES + SUM_BYTES * RANKS
    host = host_of_two(slots=8)
    host.store(1, 2, 3)
    host.store(11, 12, 13)
    wanted = (1, 2, 3, 11, 12, 13) if groups else (1, 2, 3)
    monkeypatch.setattr(answers, "ANSWER_BYTES_MAX", 3 * entry_bytes - 1)
    found = host.found(host.look_up(*wanted, groups=groups, request="long"))
    assert (len(found.slots), found.reason, found.boundary) == (2, "too_long", 4 if groups else 0)
    assert len(found.part_sums) == 2 * SUM_BYTES * RANKS
    host.release(found.lease)
    host.core.check()
    assert host.slots["active"] == 0


@pytest.mark.parametrize("parts", [2, 32, 61, PARTS_MAX])
def test_the_longest_answer_is_read(parts: int) -> None:
    """Of an engine with so many parts: every number as large as it can be."""
    most = answers.ANSWER_BYTES_MAX // (answers.ENTRY_BYTES + SUM_BYTES * parts)
    count = min(most, MATCH_BLOCKS_MAX)
    found = Found(
        lookup=2**63 - 1, epoch=2**63 - 1, lease=2**63 - 1, slots=[2**40] * count,
        checksums=[2**64 - 1] * count, block_bytes=2**40, disk_blocks=[count] * count,
        part_sums=bytes(count * parts * SUM_BYTES),
    )  # fmt: skip
    assert from_host_tier.decode(from_host_tier.encode(found)) == found


def test_one_rank_has_one_part_whose_checksum_is_the_blocks() -> None:
    """Nothing more is said of it than before."""
    host = Host()
    host.store(1)
    found = host.found(host.look_up(1))
    assert (found.checksums, found.part_sums) == ([1_001], b"")
    assert host.lease(1).slots[0].parts == 1
    block = host.core.view.blocks()[found.slots[0]]
    assert (block.part_count, block.part_sums) == (1, pack_sums([1_001]))


def test_a_fill_brings_the_checksums_of_the_parts() -> None:
    """As if the block had come from the engine."""
    host = host_of_two()
    host.disk_stored(1, 2)
    [fill] = of(host.look_up(1, 2), AskFill)
    found = found_in(host.step(filled(fill)))
    assert (len(found.slots), found.part_sums) == (2, sums(1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"part_sums": b""},
        {"part_sums": pack_sums([1, 2])},
        {"part_sums": b"odd"},
        {"part_sums": sums(1) + bytes(8)},
        {"parts": 1},
        {"parts": 65},
        {"parts": 2**16 - 1},
        {"checksum": -1},
        {"checksum": 2**64, "parts": 1, "part_sums": b""},
        {"bytes": 2 * BLOCK_BYTES + 1},
        {"bytes": 0},
    ],
    ids=str,
)
def test_a_fill_whose_parts_are_not_the_blocks_is_a_miss(changes: dict[str, Any]) -> None:
    """Goal: no worker is told to verify what cannot be."""
    host = host_of_two()
    host.disk_stored(1)
    [fill] = of(host.look_up(1), AskFill)
    found = found_in(host.step(filled(fill, **changes)))
    assert (found.slots, found.reason) == ([], "malformed")
    assert host.slots["staged"] == 0


def test_a_fill_of_a_block_of_one_part_has_its_checksum() -> None:
    """It is that of the part."""
    host = host_of_two()
    host.disk_stored(1)
    [fill] = of(host.look_up(1), AskFill)
    found = found_in(host.step(filled(fill, parts=1, part_sums=b"")))
    assert (found.checksums, found.part_sums) == ([checksum(1)], b"")


def test_a_fill_that_went_into_another_slot_is_a_miss() -> None:
    """The answers to two blocks name each other's slots: neither slot can be believed."""
    host = host_of_two()
    host.disk_stored(1, 2)
    [fill] = of(host.look_up(1, 2), AskFill)
    done = filled(fill)
    one, two = done.reply.slots
    turned = FillReply(slots=[_at(one, two.slot), _at(two, one.slot)])
    found = found_in(host.step(FillDone(done.fill, turned)))
    assert (found.slots, found.reason) == ([], "wrong_slot")
    assert host.core.view.counts["dropped.fill_wrong_slot"] == 2
    assert (host.slots["staged"], host.announced) == (0, set())


def _at(filled: FilledSlot, slot: int) -> FilledSlot:
    return FilledSlot(
        hash=filled.hash, slot=slot, ok=True, parent=filled.parent, namespace=filled.namespace,
        checksum=filled.checksum, bytes=filled.bytes, parts=filled.parts,
        part_sums=filled.part_sums,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_a_peers_block_is_verified_part_by_part(wrong: int | None) -> None:
    """What arrived sums up to what the peer leased, or one rank's part is wrong."""
    host = host_of_two(HostWithPeers)
    [pull] = host.ask_peers(1)
    came = [one + (rank == wrong) for rank, one in enumerate(part_sums(1, RANKS))]
    block = PulledBlock(pull.slots[0], leased_parts(1), pack_sums(came))
    found = found_in(host.step(PeerPulled(pull.pull, (block,), 7)))
    assert (found.part_sums, found.reason) == ((sums(1), "") if wrong is None else (b"", "corrupt"))


def leased_parts(number: int, **changes: Any) -> LeasedSlot:
    """A block of two parts as a peer leases it."""
    values: dict[str, Any] = {
        "hash": name(number).hex(), "parent": name(number - 1).hex(), "namespace": DIGEST,
        "slot": number, "checksum": checksum(number), "bytes": RANKS * BLOCK_BYTES,
        "parts": RANKS,
    }  # fmt: skip
    return LeasedSlot(**(values | changes))


def test_of_a_lease_only_blocks_that_are_cut_like_the_first_are_read() -> None:
    """And none whose parts cannot be of equal size: the door would cut them wrongly."""
    from kvbm_common.wire.verbs import DoorReply

    host = host_of_two(HostWithPeers)
    [pull] = host.ask_peers(1, 2, 3)
    door = DoorReply(epoch=1, slot_bytes=4096, slot_count=9, address=0, agent=b"")
    odd, good = leased_parts(1, bytes=2 * BLOCK_BYTES - 1), leased_parts(2)
    assert [one for _, one in readable(pull, door, [odd, good, leased(3)])] == [good]


# --- questions and refusals -------------------------------------------------------------------


def test_an_operator_is_told_of_the_parts() -> None:
    """How many, and their checksums."""
    host = host_of_two()
    [pull] = of(host.offer(1, offer=70), StartPull)
    host.pulled(pull)
    host.confirm(70)
    [answer] = of(host.step(AdminAsked(1, "block", BlockRequest(hash=name(1).hex()))), Answer)
    assert isinstance(answer.reply, BlockReply)
    assert (answer.reply.part_count, tuple(answer.reply.part_checksums)) == (2, part_sums(1, 2))


def test_ranks_with_parts_of_other_sizes_are_refused() -> None:
    """1. Rank 1 has half of what rank 0 has: refused. 2. With as much it completes the engine.
    3. Rank 0 comes back with other memory of the same size: it is welcome."""
    host = Host(attach=False)
    [first] = of(host.greet(hello(rank=0, world_size=2)), AttachPeer)
    host.step(PeerAttached(first.engine, 0, "peer-0"))
    odd = hello(rank=1, world_size=2, piece_bytes=BLOCK_BYTES // 2)
    refused = host.refusal(host.greet(odd))
    assert (refused.code, refused.field) == ("part_bytes", "regions")
    [second] = of(host.greet(hello(rank=1, world_size=2)), AttachPeer)
    effects = host.step(PeerAttached(second.engine, 1, "peer-1"))
    assert of(host.told(effects), Welcome)
    assert of(host.greet(hello(rank=0, world_size=2, agent=b"other")), AttachPeer)
