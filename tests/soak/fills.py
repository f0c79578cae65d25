"""What fills for as long as a soak lasts, and is no leak: its places in a census, and why.

A place is an attribute of a class, or a class: its objects and all its attributes. Blocks of Python
and memory are judged of all.
"""

from __future__ import annotations

_BLOCKS = {
    "Block", "BlockColumns", "BlockLookup", "BlockOrder", "SlabPool", "SlotTable",  # tiers
    "Adaptive", "Contest", "Duel", "Former", "FormerNames", "FreeOrder", "Lfu", "Lru",  # policies
    "Miniature", "Node", "Nodes", "OneByOne", "PrefixPolicy", "RecentNames", "ReuseCurves",
    "Sketch", "Succession", "Way", "_Chosen", "_Marks", "_Use",
    "HeldBlock", "RankView", "Run", "Stored", "Removed", "RawStored", "RawRemoved",  # and events
    "Chains", "Segment",  # index
    "RankPieces", "Pieces", "Lanes", "PullPart", "Share",  # of the last 256 parts of engines
}  # fmt: skip
_LAST = {
    "Diary._entries", "_Entry",
    "ExplanationRing._shared", "Stretch", "Columns",
    "Offload._asked_to_confirm", "EngineId",
    "Answers._hit_window", "FailedBlocks", "FormerLives",
    "PublishedEvents._events", "Sequencer._recent", "IndexCore._applied", "TokenNames",
    "HeldBlocks._names", "HeldBlocks._retired",
}  # fmt: skip
"""The last of something: so many and no more."""
_MINUTES = {
    "EndedEngines._left_ms", "RouterStreams._streams", "RouterStream", "StreamId",
    "IndexCore._sources", "Source", "SourceKey",
    "_Sample.figures",
}  # fmt: skip
"""What has been for some minutes, by then as many as come in those."""
_ENDED = {"LeaseTable._by_deadline"}
"""What has ended is thrown out when there is a thousand of it."""
_KINDS = {
    "Sample", "Family", "MetricsSnapshot", "StatsReply",  # metrics: the last answer of each service
    "HostTierCore._counts", "OncePerKind",
}  # fmt: skip
"""A kind of trouble, or a series, is new when it is met first. `/metrics` is judged as a whole."""
_POINTS = {"History", "_Kept"}
"""The metrics service has a point for each ten seconds of an hour, which a soak may not reach."""
FILLS = _BLOCKS | _LAST | _MINUTES | _ENDED | _KINDS | _POINTS


def fills(place: str) -> bool:
    """Tell whether a place of a service's census may fill: "index Source objects", for example."""
    service, _, name = place.partition(" ")
    assert service, place
    assert name, place
    name = name.removesuffix(" objects")
    return name in FILLS or name.partition(".")[0] in FILLS
