"""Lookups that engines answer by the filter: counted and explained as if they had been asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_common.identity import content_digest, pack_hashes
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.local import MissedLookup, Misses, Refused

from tests.services.host_tier.helpers import NAMESPACE, Host, incarnation, name, of

CONTENT = content_digest([1, 2, 3, 4])


def missed(
    request: str, *wanted: int, groups: Sequence[GroupRun] = (), **fields: Any
) -> MissedLookup:
    """A lookup that an engine has answered."""
    hashes = pack_hashes(name(number) for number in wanted)
    return MissedLookup(
        lookup=len(request), hashes=hashes, request=request, groups=list(groups), **fields
    )


def told(host: Host, *lookups: MissedLookup, **fields: Any) -> list[object]:
    """An engine tells; returns what it is told."""
    message = Misses(
        **({"namespace": NAMESPACE.digest} | fields), engine="ada", incarnation=incarnation(1),
        lookups=list(lookups),
    )  # fmt: skip
    return host.told(host.say(message))


def counted(host: Host) -> dict[str, int]:
    """Every counter of lookups and their blocks."""
    kinds = ("lookups", "lookup_blocks", "missed_blocks", "matched")
    return {k: v for k, v in host.core.view.counts.items() if v and k.startswith(kinds)}


def reasons(host: Host, request: str) -> list[tuple[str, int]]:
    """The reasons that are kept of a request, with their blocks."""
    [explained] = host.core.view.explanations(request)
    return [(one.reason, one.blocks) for one in explained.segments]


def test_a_hit_that_would_need_no_block_misses_none() -> None:
    """At a chunk's end a hit needs no block of its group: a client with nothing else asks so."""
    host = Host()
    assert told(host, missed("r", 1, 2, groups=[GroupRun(4, 2, 0, 8)])) == []
    host.core.check()


def test_misses_count_as_lookups_that_found_nothing() -> None:
    """Goal: hit rates and counters lose nothing. Method: a host tier that was asked, beside it."""
    asked, host = Host(), Host()
    for number in (1, 11):
        asked.look_up(number, number + 1, request=f"r{number}")
    assert told(host, missed("r1", 1, 2), missed("r11", 11, 12), in_vain=3) == []
    for one in (asked, host):
        one.wait(50)
        assert reasons(one, "r1") == [("never_stored", 2)]
    expected = counted(asked) | {"lookups_at_once": 2, "lookups_in_vain": 3}
    assert counted(host) == expected
    figures = [one.core.view.statistics(one.now_ms).figures for one in (asked, host)]
    assert figures[0]["lookups_windowed"] == figures[1]["lookups_windowed"] == 2


def test_groups_miss_what_a_hit_of_all_tokens_needs() -> None:
    """The same number as where it is asked: of a window its last block alone."""
    groups = [GroupRun(4, 3), GroupRun(4, 3, 1)]
    asked, host = Host(), Host()
    asked.look_up(1, 2, 3, 11, 12, 13, groups=groups, request="r")
    told(host, missed("r", 1, 2, 3, 11, 12, 13, groups=groups))
    for one in (asked, host):
        one.wait(50)
        assert reasons(one, "r") == [("never_stored", 4)]
    assert counted(host) == counted(asked) | {"lookups_at_once": 1}


def test_a_miss_is_explained_by_what_is_known_of_its_first_tokens() -> None:
    host = Host()
    told(host, missed("first", 1, content=CONTENT))
    host.store(1)
    told(host, missed("salted", 2, content=CONTENT))
    assert reasons(host, "first") == [("never_stored", 1)]
    assert reasons(host, "salted") == [("salt_differs", 1)]


def test_a_miss_is_explained_as_of_its_time_though_its_blocks_have_come() -> None:
    """The offer may overtake the misses: it takes another way, through the consolidator."""
    host = Host()
    told(host, missed("first", 1, content=CONTENT))
    host.store(1, 2, 3)
    told(host, missed("late", 2, 3, 4, content=CONTENT))
    assert reasons(host, "late") == [("salt_differs", 1), ("never_stored", 2)]
    host.look_up(5, 1, 2, request="asked")
    host.wait(50)
    assert reasons(host, "asked")[1:] == [("behind", 2)], "who is asked knows the time"


def test_what_was_avoided_is_explained_as_that() -> None:
    host = Host()
    told(host, missed("r", 1, avoided=2))
    assert reasons(host, "r") == [("never_stored", 1), ("avoided", 2)]


def test_another_namespace_is_counted_and_not_believed() -> None:
    host = Host()
    told(host, missed("r", 1), namespace=b"x" * 32)
    assert counted(host) == {}
    assert host.core.view.counts["refused.lookup_namespace"] == 1


def test_malformed_misses_change_nothing() -> None:
    """The second one's groups do not fit: nothing of the first is counted."""
    host = Host()
    wrong = missed("wrong", 1, 2, groups=[GroupRun(4, 5)])
    [refused] = of(told(host, missed("r", 1), wrong), Refused)
    assert (refused.about, refused.field) == ("misses", "hashes")
    assert counted(host) == {}
