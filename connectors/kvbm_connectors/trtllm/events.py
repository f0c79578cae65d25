"""Events of TensorRT-LLM, translated to those of vLLM's wire.

`LLM.get_kv_cache_events` hands out JSON, numbered by `event_id`; no event can be requested again.
The differences to vLLM's events, and their translation:

    a gap in the numbers        events are lost: `AllBlocksCleared`; later events build it up again
    `updated`, a cache level    the block has moved between device (0) and host (1): removed here,
                                stored there, with the tokens remembered from its `stored`
    a block that is not full    left out: it has no name
    another attention window    left out: only the largest window covers whole prefixes
    `token_extra_id`            the token is not only its id (prompt tuning): left out, with all
                                that follows in its event
    `mm_keys`, `cache_salt`     extra keys of the block

Source: the JSON layout of TensorRT-LLM 1.2's event API; see tests/golden/engine_frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    EngineHash,
    unsigned,
)

MEDIA = {0: "GPU", 1: "CPU"}
"""Cache levels."""


class _Block(NamedTuple):
    """The fields of a block that a move between levels does not repeat."""

    parent: EngineHash | None
    tokens: tuple[int, ...]
    keys: tuple[Any, ...] | None
    salt: str | None
    group: int | None


class TrtllmEvents:
    """The translation of one rank's events, in the order in which they were pulled."""

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens > 0
        self._block_tokens = block_tokens
        self._next_id: int | None = None
        self._window = 0
        self._blocks: dict[EngineHash, _Block] = {}
        self.drops: Counter[str] = Counter()
        """Reason → events and blocks that were left out."""

    def translate(self, raw: Sequence[Mapping[str, Any]]) -> list[EngineEvent]:
        """Translate the events of one pull. Raises KeyError, TypeError or ValueError for other
        layouts."""
        events: list[EngineEvent] = []
        for one in raw:
            if self._next_id is not None and one["event_id"] != self._next_id:
                self.drops["gap"] += 1
                self._blocks.clear()
                events.append(AllBlocksCleared())
            self._next_id = one["event_id"] + 1
            events += self._translated(one)
        return events

    def _translated(self, one: Mapping[str, Any]) -> list[EngineEvent]:
        data, group = one["data"], one.get("layer_group_id")
        window = one.get("window_size") or 0
        self._window = max(self._window, window)
        if window < self._window:
            self.drops["window"] += 1
            return []
        match data["type"]:
            case "stored":
                return self._stored(data, group)
            case "removed":
                return self._removed(tuple(map(unsigned, data["block_hashes"])), group)
            case "updated":
                return self._updated(data)
            case "created":
                return []
            case other:
                self.drops["unknown_type"] += 1
                assert isinstance(other, str)
                return []

    def _stored(self, data: Mapping[str, Any], group: int | None) -> list[EngineEvent]:
        """Return one event per block, a chain of parents: keys and salts are per block."""
        parent = data["parent_hash"]
        parent = None if parent is None else unsigned(parent)
        events: list[EngineEvent] = []
        for raw in data["blocks"]:
            tokens = tuple(int(token["token_id"]) for token in raw["tokens"])
            if len(tokens) < self._block_tokens:
                self.drops["partial"] += 1
                break
            if any(token.get("token_extra_id") for token in raw["tokens"]):
                self.drops["token_extra"] += 1
                break
            name = unsigned(int(raw["block_hash"]))
            keys = tuple((key["hash"], key["start_offset"]) for key in raw.get("mm_keys") or ())
            block = _Block(parent, tokens, keys or None, raw.get("cache_salt"), group)
            self._blocks[name] = block
            events.append(self._store(name, block, raw.get("cache_level", 0)))
            parent = name
        return events

    def _store(self, name: EngineHash, block: _Block, level: int) -> BlockStored:
        return BlockStored(
            block_hashes=(name,),
            parent=block.parent,
            token_ids=block.tokens,
            block_size=self._block_tokens,
            medium=MEDIA.get(level, "STORAGE"),
            extra_keys=(block.keys,) if block.keys else None,
            cache_salt=block.salt if block.parent is None else None,
            group_idx=block.group,
        )

    def _removed(self, names: tuple[EngineHash, ...], group: int | None) -> list[EngineEvent]:
        known = tuple(name for name in names if self._blocks.pop(name, None) is not None)
        self.drops["removed_unknown"] += len(names) - len(known)
        if not known:
            return []
        return [BlockRemoved(block_hashes=known, medium="GPU", group_idx=group)]

    def _updated(self, data: Mapping[str, Any]) -> list[EngineEvent]:
        name, level = unsigned(int(data["block_hash"])), data.get("cache_level")
        block = self._blocks.get(name)
        if level is None:  # A priority.
            return []
        if block is None:
            self.drops["updated_unknown"] += 1
            return []
        old, new = MEDIA.get(level["old_value"], "STORAGE"), level["new_value"]
        removed = BlockRemoved(block_hashes=(name,), medium=old, group_idx=block.group)
        return [removed, self._store(name, block, new)]
