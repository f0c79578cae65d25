"""A lower tier's snapshot, packed page by page."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.identity import IdentityError
from kvbm_common.nats.snapshots import pages_of
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.verbs import SnapshotReply
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot

from tests.services.host_tier.helpers import BLOCK_BYTES, NAMESPACE, name, on_disk


def reply() -> SnapshotReply:
    """Twenty blocks, as of event 1."""
    source = Announcer(host="h", source="disk-tier-0", tier="disk", epoch=3)
    source.cleared("start")
    return source.snapshot([on_disk(number) for number in range(1, 21)])


def test_all_pages_are_in_it_in_pieces() -> None:
    pages = pages_of(reply(), page_bytes=400)
    assert len(pages) > 1
    snapshot: LowerSnapshot | None = None
    for page in pages:
        snapshot = LowerSnapshot.of(page, before=snapshot)
    assert snapshot is not None
    assert (snapshot.epoch, snapshot.seq) == (3, 1)
    pieces = [piece for part in snapshot.parts for piece in part.pieces(4)]
    assert max(map(len, pieces)) == 4
    assert [one for piece in pieces for one in piece] == [name(number) for number in range(1, 21)]
    kinds = {(part.namespace, part.block_bytes) for part in snapshot.parts}
    assert kinds == {(NAMESPACE.digest, BLOCK_BYTES)}


def test_a_page_with_an_invalid_hash_is_refused() -> None:
    """The shell then has no answer, and the core asks again."""
    page = msgspec.json.decode(msgspec.json.encode(reply()), type=SnapshotReply)
    page.parts[0].runs[0].hashes[3] = "no"
    with pytest.raises(IdentityError):
        LowerSnapshot.of(page)
