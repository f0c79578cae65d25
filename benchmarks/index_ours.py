"""Our side of the index benchmark: the core, fed with the bytes of NATS messages."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvbm_common.identity import SequenceHash
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_subscription import BATCH_MAX
from kvbm_common.service.garbage import Garbage
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.events import SUBJECT_PREFIX
from kvbm_index.core import event_batch, event_decoder
from kvbm_index.core.core import IndexCore
from kvbm_index.core.messages import EventsReceived

from benchmarks import index_workload as workload

NAMESPACE = "0" * 64


class Encoder:
    """Numbers the events of each source, and writes them as they are on the wire."""

    def __init__(self) -> None:
        self._sequences: Counter[int] = Counter()

    def stored(self, source: int, parent: bytes, blocks: list[bytes]) -> EventMessage:
        """As the stream delivers it."""
        runs = [{"parent": parent.hex(), "hashes": [one.hex() for one in blocks]}]
        return self._event(source, "stored", {"runs": runs})

    def removed(self, source: int, _: bytes, blocks: list[bytes]) -> EventMessage:
        """The same, of blocks that are gone."""
        return self._event(source, "removed", {"hashes": [one.hex() for one in blocks]})

    def _event(self, source: int, kind: str, data: dict[str, Any]) -> EventMessage:
        self._sequences[source] += 1
        event = {
            "kind": kind, "v": 1, "host": "gpu-a", "source": f"engine-{source}", "tier": "device",
            "epoch": 1_760_000_000_000_017, "seq": self._sequences[source],
            "ts_ms": 1_760_000_000_123, "rank": 0, "group": 0, "namespace": NAMESPACE,
        }  # fmt: skip
        subject = f"{SUBJECT_PREFIX}.gpu-a.engine-{source}.{kind}"
        payload = json.dumps(event | data, separators=(",", ":")).encode()
        return EventMessage(subject, payload, self._sequences[source])


def main() -> None:
    """One round at one batch size; or what is called `shared` or `listed`."""
    workload.pin()
    Garbage().start()  # As every service does.
    if sys.argv[1] == "shared":
        workload.say({"match_s": shared()})
        return
    if sys.argv[1] == "listed":
        workload.say(listed())
        return
    batch = int(sys.argv[1])
    core, encoder = IndexCore(), Encoder()
    apply = feeder(core)
    before = workload.resident_bytes()
    stored_s = workload.feed(workload.chunks(batch, encoder.stored, leaves_first=False), apply)
    held = workload.resident_bytes() - before
    assert core.statistics().blocks >= workload.BLOCKS
    match_s = workload.match_seconds(core.match, _again, workload.long_chains())  # type: ignore[arg-type]
    removed_s = workload.feed(workload.chunks(batch, encoder.removed, leaves_first=True), apply)
    assert core.statistics().blocks == 0, core.statistics()
    workload.say({"stored_s": stored_s, "removed_s": removed_s, "match_s": match_s, "bytes": held,
                  "machine_s": workload.machine_seconds(workload.long_chains())})  # fmt: skip


def feeder(core: IndexCore) -> Callable[[list[Any]], None]:
    """What takes messages as the service does: in batches."""

    def apply(chunk: list[Any]) -> None:
        for at in range(0, len(chunk), BATCH_MAX):
            events = tuple(event_batch.read(chunk[at : at + BATCH_MAX], refuse))
            core.step(EventsReceived(events), 0)

    def refuse(message: EventMessage, error: WireError) -> None:
        raise AssertionError(message) from error

    return apply


def listed() -> dict[str, object]:
    """What is put off until a block in the middle of a chain is sought: seconds, and memory then.

    The first question for a block that nobody has pays for every block that was stored before.
    """
    core = IndexCore()
    before = workload.resident_bytes()
    workload.feed(workload.chunks(16, Encoder().stored, leaves_first=False), feeder(core))
    seconds = []
    for number in range(2):
        started = time.process_time()
        assert core.match([SequenceHash(bytes([255]) * 15 + bytes([number]))]) == []
        seconds.append(time.process_time() - started)
    return {"first_s": seconds[0], "next_s": seconds[1],
            "bytes": workload.resident_bytes() - before}  # fmt: skip


def shared() -> list[float]:
    """CPU seconds of matches of chains that every source holds."""
    core, encoder = IndexCore(), Encoder()
    asked = workload.long_chains()[:200]
    for source, names in itertools.product(range(workload.SOURCES), asked):
        message = encoder.stored(source, workload.NO_PARENT, names)
        core.step(EventsReceived((event_decoder.read(message.subject, message.payload),)), 0)
    assert [found.blocks for found in core.match(asked[0])] == [512] * workload.SOURCES  # type: ignore[arg-type]
    return workload.match_seconds(core.match, _again, asked)  # type: ignore[arg-type]


def _again(name: bytes) -> bytes:
    """Equal, and another object: its hash is not known yet."""
    return bytes(bytearray(name))


if __name__ == "__main__":
    main()
