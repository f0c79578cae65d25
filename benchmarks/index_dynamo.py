"""The other side of the index benchmark: Dynamo's RadixTree. Runs in .venv-dynamo."""

from __future__ import annotations

import json
import sys
from typing import Any

from dynamo._core import RadixTree  # type: ignore[import-not-found]

from benchmarks import index_workload as workload


def name(block: bytes) -> int:
    """Its hashes have 64 bits."""
    return int.from_bytes(block[:8], "big")


def stored(source: int, parent: bytes, blocks: list[bytes]) -> tuple[int, bytes]:
    """An event as its Python API takes it."""
    pairs = [{"block_hash": name(one), "tokens_hash": name(one)} for one in blocks]
    above = None if parent == workload.NO_PARENT else name(parent)
    return source, _event({"stored": {"parent_hash": above, "blocks": pairs}})


def removed(source: int, _: bytes, blocks: list[bytes]) -> tuple[int, bytes]:
    """The same for blocks that are gone."""
    return source, _event({"removed": {"block_hashes": [name(one) for one in blocks]}})


def _event(data: dict[str, Any]) -> bytes:
    event = {"event_id": 1, "dp_rank": 0, "data": data}
    return json.dumps(event, separators=(",", ":")).encode()


def main() -> None:
    """One round at one batch size."""
    workload.pin()
    batch = int(sys.argv[1])
    tree = RadixTree()

    def apply(chunk: list[Any]) -> None:
        for source, payload in chunk:
            tree.apply_event(source, payload)

    before = workload.resident_bytes()
    stored_s = workload.feed(workload.chunks(batch, stored, leaves_first=False), apply)
    held = workload.resident_bytes() - before
    asked = workload.long_chains()
    found = tree.find_matches([name(one) for one in asked[0]])
    assert list(found.scores.values()) == [workload.MATCH_BLOCKS], found.scores
    match_s = workload.match_seconds(tree.find_matches, name, asked)
    removed_s = workload.feed(workload.chunks(batch, removed, leaves_first=True), apply)
    assert not tree.find_matches([name(one) for one in asked[0]]).scores
    workload.say({"stored_s": stored_s, "removed_s": removed_s, "match_s": match_s, "bytes": held})


if __name__ == "__main__":
    main()
