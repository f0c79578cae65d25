"""The table of operators' verbs. From an entry follow:

    the verb on NATS      kvbm_common.service.admin_verbs
    the route             kvbm_metrics.shell.admin_api
    the command           kvbm_cli.verb_commands
    AsyncAPI, wire.md     release.asyncapi, release.wire_manual

The messages are in `kvbm_common.wire.admin`. CONTRIBUTING.md has the recipe for a new verb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from kvbm_common.eviction import POLICIES
from kvbm_common.wire import admin
from kvbm_common.wire.events import Hex128, HexDigest, Token
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX

SERVICES = ("index", "host-tier", "disk-tier", "object-tier", "metrics", "consolidator")
"""Every kind of service; each instance answers `stats`, `metrics` and `log_level`."""
LOWER_TIERS = ("disk-tier", "object-tier")
TIERS = ("host-tier", *LOWER_TIERS)

REQUIRED: Any = msgspec.NODEFAULT


@dataclass(frozen=True, slots=True)
class Given:
    """Something that an operator gives: a field of the route's body, and an option of the command.

    It fills the field of the request that has its name. `…_s` fills `…_ms`: people say seconds.
    """

    name: str
    help: str
    type: Any = None
    """With `msgspec.Meta` for bounds and without None; not given: the type of the request's."""
    default: Any = REQUIRED
    """The default in the body. A command does not send a parameter that has this value."""
    command_default: Any = REQUIRED
    """The default of the command, where the body requires a value."""
    argument: str = ""
    """The placeholder, where the command takes an argument and not an option."""
    flags: str = ""
    """The names of the option, where they do not follow from `name`."""


def either(names: Sequence[str]) -> str:
    """Return a choice in words.

    >>> either(["lru", "lfu", "prefix"])
    'lru, lfu or prefix'
    """
    return f"{', '.join(names[:-1])} or {names[-1]}"


def tier_of(*media: str) -> Given:
    """Return the choice of one of these media."""
    return Given("tier", f"{either(media)}.", Literal[media])


TIER = tier_of("host", "disk", "object", "all")
HOST = Given("host", "Only on this host.", Token, None)
INSTANCE = Given("instance", "Only this instance.", Token, None)
WHERE = (TIER, HOST, INSTANCE)


@dataclass(frozen=True, slots=True)
class OperatorVerb:
    """One line of the table."""

    name: str
    request: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    help: str
    """One line, for the route and the command."""
    answered_by: Sequence[str] = TIERS
    given: Sequence[Given] = WHERE
    """In the order of the command's options."""
    exactly_one_of: Sequence[str] = ()
    at_least_one_of: Sequence[str] = ()
    job: bool = False
    """True if the route answers with a job, whose steps are in `kvbm_metrics`: the verb takes
    long."""
    method: Literal["GET", "POST"] = "POST"
    path: str = ""
    """Empty: /v1/ and the name."""
    tag: str = "changes"

    def type_of(self, one: Given) -> Any:
        """Return the type of something given, without None."""
        if one.type is not None:
            return one.type
        types = {field.name: field.type for field in msgspec.structs.fields(self.request)}
        parts = get_args(types[one.name])
        if NoneType in parts:
            return next(part for part in parts if part is not NoneType)
        return types[one.name]

    @property
    def is_change(self) -> bool:
        """Tell whether the verb changes something, so that it is audited."""
        return self.method == "POST"

    @property
    def route(self) -> str:
        """The path of its HTTP route."""
        return self.path or f"/v1/{self.name}"

    @property
    def command(self) -> str:
        """The name of its command: `kvbm loglevel` has no underscore to type."""
        return self.name.replace("_", "")

    @property
    def description(self) -> str:
        """The help of its route."""
        return f"{self.help} A job." if self.job else self.help


# --- the table ------------------------------------------------------------------------------

_Name = Annotated[Hex128, Meta(examples=["ee47acab818fb0f368c71c5e228d1221"])]
_REMOVED = (
    Given("hashes", "Hashes of blocks, 32 hex digits, prefix first.",
          Annotated[list[_Name], Meta(max_length=MATCH_BLOCKS_MAX)], None, argument="hashes"),
    TIER,
    Given("prefix", "This block and its descendants.", _Name, None),
    Given("namespace", "Everything of this namespace: its digest, 64 hex digits.", HexDigest, None),
    Given("everything", "Everything.", default=False),
    HOST, INSTANCE,
)  # fmt: skip
_REMOVED_BY = ("hashes", "prefix", "namespace", "everything")

OPERATOR_VERBS = (
    OperatorVerb(
        "block", admin.BlockRequest, admin.BlockReply,
        "Show one block: where it is, what holds it there, and what has happened to it.",
        method="GET", path="/v1/blocks/{hash}", tag="blocks",
    ),
    OperatorVerb(
        "evict", admin.RemoveRequest, admin.RemoveReply, "Remove blocks that are not being read.",
        given=_REMOVED, exactly_one_of=_REMOVED_BY, job=True,
    ),
    OperatorVerb(
        "reset", admin.RemoveRequest, admin.RemoveReply,
        "Remove blocks, also those that are being read. Under traffic others may arrive: "
        "`arrived` counts them, and `kvbm drain` before it keeps them out.",
        given=_REMOVED, exactly_one_of=_REMOVED_BY, job=True,
    ),
    OperatorVerb(
        "pin", admin.PinRequest, admin.PinReply, "Keep blocks from eviction for a while.",
        given=(
            Given("hashes", "Hashes of blocks.",
                  Annotated[list[_Name], Meta(min_length=1, max_length=admin.STEP_BLOCKS_MAX)],
                  argument="hashes"),
            Given("ttl_s", "For so many seconds.",
                  Annotated[float, Meta(gt=0, le=admin.PIN_TTL_MS_MAX / 1000)],
                  command_default=3600.0),
            *WHERE,
        ),
    ),
    OperatorVerb(
        "unpin", admin.UnpinRequest, admin.UnpinReply, "End a pin by its number.",
        given=(
            Given("pin", "As `kvbm pins` lists it.", argument="pin"),
            tier_of("host", "disk", "object"),
            Given("host", "The host of the pin.", Token),
            Given("instance", "The instance of the pin.", Token, command_default="0"),
        ),
    ),
    OperatorVerb(
        "pins", admin.PinsRequest, admin.PinsReply, "List every pin of every tier.", method="GET",
    ),
    OperatorVerb(
        "drain", admin.DrainRequest, admin.DrainReply,
        "Have tiers take no new blocks; reads go on.",
    ),
    OperatorVerb(
        "undrain", admin.DrainRequest, admin.DrainReply,
        "Have tiers take new blocks again.",
    ),
    OperatorVerb(
        "resize", admin.ResizeRequest, admin.ResizeReply,
        "Use fewer or more slots of a tier's medium, until it is started again.",
        given=(
            Given("slots", "So many slots of each instance that is meant.", argument="slots"),
            tier_of("host", "disk"), HOST, INSTANCE,
        ),
        job=True,
    ),
    OperatorVerb(
        "policy", admin.PolicyRequest, admin.PolicyReply,
        "Change the eviction policy of tiers; what they hold stays.",
        given=(
            Given("policy", either([*POLICIES]), Literal[tuple(POLICIES)], argument="name"),
            *WHERE,
        ),
    ),
    OperatorVerb(
        "filter", admin.FilterRequest, admin.FilterReply,
        "Change the filter that says which blocks deserve disk or bucket.",
        answered_by=LOWER_TIERS,
        given=(
            tier_of("disk", "object", "all"),
            Given("enabled", "Whether it filters at all.", default=None, flags="--on/--off"),
            Given("pass_count", "A block passes from this count on.", default=None),
            Given("decay_s", "Counts lose 1 every so many seconds.",
                  Annotated[float, Meta(ge=1, le=7 * 24 * 3600)], None),
            HOST, INSTANCE,
        ),
        at_least_one_of=("enabled", "pass_count", "decay_s"),
    ),
    OperatorVerb(
        "prefetch", admin.PrefetchRequest, admin.PrefetchReply,
        "Bring a run of blocks from disk or bucket into host memory.",
        answered_by=("host-tier",), job=True,
        given=(),  # Hashes, or tokens with a namespace: its route and its command are by hand.
    ),
    OperatorVerb(
        "forget", admin.ForgetRequest, admin.ForgetReply,
        "Forget the lost services of a host that is gone for good: resets go on without them.",
        answered_by=("metrics",),
        given=(Given("lost_host", "The host, as `kvbm status` names it.", argument="host"),),
    ),
    OperatorVerb(
        "log_level", admin.LogLevelRequest, admin.LogLevelReply,
        "Change the log level of running services.",
        answered_by=SERVICES,
        given=(
            Given("level", "debug, info, warning or error", argument="level"),
            Given("kind", "Only services of this kind.", Literal[SERVICES], None),
            HOST, INSTANCE,
        ),
    ),
)  # fmt: skip
"""Every verb."""
