"""The table of roles and the permissions that follow from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.access.grants import Grants, grants_of, matches
from kvbm_common.access.roles import ADMIN, BY_NAME, CONSUMER, ROLES, role_of
from kvbm_common.nats.streams import STREAMS
from kvbm_common.wire.operator_verbs import LOWER_TIERS, SERVICES, TIERS
from kvbm_common.wire.verbs import verb_subject

WORDS = st.sampled_from(["a", "b", "*"])
SUBJECTS = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


def of(role: str, host: str = "a") -> Grants:
    """Return what a credential of a role on a host may do, with two instances."""
    return grants_of(BY_NAME[role], host=host, instances=("0", "1"))


def askers(kind: str, verb: str, host: str = "a") -> set[str]:
    """Return the roles of host `a` that may ask for a verb on a host."""
    subject = verb_subject(kind, verb, host=host, instance="0")
    return {role.name for role in ROLES if of(role.name).may_publish(subject)} - {ADMIN}


def test_every_service_has_a_role() -> None:
    """And each role that serves is a service; two are not."""
    assert {role.name for role in ROLES if role.is_service} == set(SERVICES)
    assert {role.name for role in ROLES if not role.is_service} == {ADMIN, CONSUMER}


@pytest.mark.parametrize("kind", LOWER_TIERS)
def test_only_the_host_tier_asks_for_fills(kind: str) -> None:
    """Of its own host."""
    assert askers(kind, "fill") == {"host-tier"}
    assert askers(kind, "fill", host="b") == set()


def test_only_host_tiers_ask_for_doors_and_leases_of_other_hosts() -> None:
    """On its own host a lower tier leases what it writes."""
    for verb in ("door", "lease", "release"):
        assert askers("host-tier", verb, host="b") == {"host-tier"}
    assert askers("host-tier", "door") == {"host-tier"}
    assert askers("host-tier", "lease") == {"host-tier", *LOWER_TIERS}


def test_events_of_a_tier_are_its_own() -> None:
    """No role publishes those of another role, host or unknown instance."""
    for tier in TIERS:
        for host in ("a", "b"):
            subject = f"kvbm.v1.events.{host}.{tier}-0.stored"
            may = {role.name for role in ROLES if of(role.name).may_publish(subject)} - {ADMIN}
            assert may == ({tier} if host == "a" else set())
    assert of("consolidator").may_publish("kvbm.v1.events.a.vllm-0.stored")
    assert not of("consolidator").may_publish("kvbm.v1.events.b.vllm-0.stored")
    assert not of("host-tier").may_publish("kvbm.v1.events.a.host-tier-2.stored")


def test_registry_entries_are_their_owners() -> None:
    """A consolidator also enters the engines of its host."""
    for kind in (*SERVICES, "engine"):
        for host in ("a", "b"):
            subject = f"$KV.kvbm-registry.services.{kind}.{host}.0"
            may = {role.name for role in ROLES if of(role.name).may_publish(subject)} - {ADMIN}
            owner = "consolidator" if kind == "engine" else kind
            here = host == "a" or not BY_NAME[owner].per_host
            assert may == ({owner} if here else set())


@pytest.mark.parametrize("verb", ["evict", "reset", "drain", "resize", "log_level"])
def test_changes_are_for_operators(verb: str) -> None:
    """By the HTTP API, or with the admin's credentials."""
    assert askers("host-tier", verb) == {"metrics"}


def test_a_consumer_reads_only() -> None:
    """It publishes questions, and calls of the API that read."""
    for subject in of(CONSUMER).publish:
        is_question = subject.startswith(("kvbm.v1.index.",)) or subject.endswith(".snapshot")
        reads = subject.startswith(("$JS.API.CONSUMER.", "$JS.API.STREAM.INFO.", "$JS.FC."))
        assert is_question or reads or subject in ("$JS.API.INFO", "$JS.API.STREAM.NAMES"), subject


def test_no_service_makes_changes_or_purges_streams() -> None:
    """But for the index, which purges its own images."""
    for role in ROLES:
        if role.name == ADMIN:
            continue
        for spec in STREAMS:
            for call in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "RESTORE"):
                subject = f"$JS.API.STREAM.{call}.{spec.name}"
                own = (role.name, call, spec.name) == ("index", "PURGE", "OBJ_KVBM_INDEX")
                assert of(role.name).may_publish(subject) is own, subject


def test_inboxes_are_not_shared() -> None:
    """No role hears the answers that another one gets, on its host or elsewhere."""
    for role in ROLES:
        if role.name == ADMIN:
            continue
        own = of(role.name)
        assert own.may_subscribe(f"_INBOX.{role.name}.{'a.' if role.per_host else ''}x.*")
        assert not own.may_subscribe("_INBOX.>")
        for other in ROLES:
            heard = f"_INBOX.{other.name}.{'b.' if other.per_host else ''}x.*"
            assert own.may_subscribe(heard) is (other is role and not role.per_host)


def test_verbs_are_heard_by_their_kind_only() -> None:
    """A service cannot answer in the place of another kind or host."""
    for role in ROLES:
        for kind in SERVICES:
            for host in ("a", "b"):
                subject = verb_subject(kind, "stats", host=host, instance="0")
                here = host == "a" or not BY_NAME[kind].per_host
                expected = role.name == ADMIN or (role.name == kind and here)
                assert of(role.name).may_subscribe(subject) is expected


def test_a_service_of_another_package_has_what_every_service_has() -> None:
    """It reads the registry and no events."""
    grants = grants_of(role_of("sample"), host="a")
    assert grants.may_subscribe("kvbm.v1.sample.a.0.stats")
    assert grants.may_publish("$KV.kvbm-registry.services.sample.a.0")
    assert not grants.may_publish("$JS.API.STREAM.INFO.KVBM_EVENTS")


@given(SUBJECTS, SUBJECTS)
def test_a_pattern_covers_what_it_matches_word_by_word(pattern: str, subject: str) -> None:
    """`*` is one word; a subject with a wildcard is covered by a wildcard only."""
    pairs = list(zip(pattern.split("."), subject.split("."), strict=False))
    alike = pattern.count(".") == subject.count(".") and all(
        one in ("*", other) for one, other in pairs
    )
    assert matches(pattern, subject) is alike
    assert matches(f"{pattern}.>", f"{pattern}.x.y") is True
    assert matches(f"{pattern}.>", pattern) is False
