"""Caller: a thread of a rank in a storm, which compares what its calls bring.

A page holds junk as soon as its call has returned, as SGLang reuses it at once. Junk that changes
shows a byte that came too late.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Sequence

from tests.connectors.sglang.pool import Extra, Transfer, keys_of
from tests.connectors.sglang.storm_engines import OWN_PAGES, Engine, Rank, Storm

CHAIN_MAX = 8
BRANCHES = 0.15
"""How likely a page is to leave the path that most chains share."""
CALM_TURNS = 150
LOOK_EVERY = 4
"""Turns between two looks for late bytes."""
JUNK = 7


class Caller:
    """One thread, with pages of its own in each pool of its rank."""

    def __init__(self, storm: Storm, engine: Engine, rank: Rank, number: int) -> None:
        self.storm, self.engine, self.rank = storm, engine, rank
        self.name = f"{storm.seed} {engine.number}.{rank.number}.{number}"
        self.rng = random.Random(self.name)
        self.own = range(number * OWN_PAGES, (number + 1) * OWN_PAGES)
        for name in rank.pools:
            self.fill(rank, name, self.own, [JUNK] * OWN_PAGES)

    def run(self) -> None:
        """Call until the program is over."""
        storm = self.storm
        try:
            for turn in itertools.count():
                if storm.over.is_set() or (storm.is_calm and turn == CALM_TURNS):
                    return
                with storm.everybody.passing(), self.engine.gate.passing():
                    self.turn()
                if turn % LOOK_EVERY == 0:
                    self.look_for_late_bytes()
                with storm.lock:
                    storm.turns += 1
        except Exception:
            storm.wrong(f"{self.name}: {traceback.format_exc()}")

    def turn(self) -> None:
        """Make one call, or a few that belong together."""
        name = self.rng.choice(list(self.rank.pools))
        calls = (self.write, self.read, self.ask, self.ask_all, self.odd, self.write_and_read)
        [call] = self.rng.choices(calls, (6, 6, 2, 2, 1, 3))
        call(name, self.chain())

    def chain(self) -> list[str]:
        """Draw keys of a prefix."""
        rng = self.rng
        path = [rng.randrange(4)]
        path += (int(rng.random() < BRANCHES) for _ in range(rng.randrange(CHAIN_MAX)))
        beginnings = (path[: depth + 1] for depth in range(len(path)))
        return [keys_of(f"{self.storm.seed} {one}", 1)[0] for one in beginnings]

    def pages(self, count: int) -> list[int]:
        """Draw pages, in any order."""
        return self.rng.sample(list(self.own), count)

    def fill(self, rank: Rank, name: str, pages: Sequence[int], seeds: Sequence[int]) -> None:
        """Write a content into each of these pages."""
        for page, seed in zip(pages, seeds, strict=True):
            rank.pools[name].fill(page, seed)

    def seeds(self, name: str, keys: Sequence[str]) -> list[int]:
        """Return the contents of the pages of these keys."""
        storm = self.storm
        return [storm.content(storm.key(self.engine, self.rank, name, key)) for key in keys]

    # --- writes and reads -------------------------------------------------------------------

    def write(self, name: str, keys: list[str], first: int | None = None) -> bool:
        """Store pages from the first one on, or from one that is drawn."""
        storm, there = self.storm, self.pages(len(keys))
        if first is None:
            first = self.rng.choice((0, 0, self.rng.randrange(len(keys))))
        self.fill(self.rank, name, there, self.seeds(name, keys))
        with storm.lock:
            storm.begun |= {storm.key(self.engine, self.rank, name, key) for key in keys}
        indices = self.rank.pools[name].indices(there[first:])
        with storm.timed("set"):
            flags = self.rank.storage.set(keys[first:], indices, Extra(keys[:first]), name)
        self.fill(self.rank, name, there, [JUNK] * len(there))
        assert len(flags) == len(keys) - first
        is_stored = all(flags)
        storm.counts["pages stored" if is_stored else "pages not stored"] += len(flags)
        if storm.is_calm and not is_stored:
            storm.wrong(f"{self.name}: a write of {len(flags)} to {name} has failed")
        return is_stored

    def read(self, name: str, keys: list[str], rank: Rank | None = None) -> list[bool]:
        """Load pages into our part of a rank's pool, and compare them."""
        storm, reader, there = self.storm, rank or self.rank, self.pages(len(keys))
        pool, seeds = reader.pools[name], self.seeds(name, keys)
        with storm.timed("get"):
            flags = reader.storage.get(keys, pool.indices(there), name)
        right = [pool.holds(page, seed) for page, seed in zip(there, seeds, strict=True)]
        self.fill(reader, name, there, [JUNK] * len(there))
        assert len(flags) == len(keys)
        storm.counts["pages loaded"] += sum(flags)
        storm.counts["pages missed"] += len(flags) - sum(flags)
        if any(here and not same for here, same in zip(flags, right, strict=True)):
            storm.wrong(f"{self.name}: wrong bytes in {name}: {flags} {right}")
        return flags

    def write_and_read(self, name: str, keys: list[str]) -> None:
        """Store, and load at once: in calm weather all is there."""
        is_stored = self.write(name, keys, 0) and self.engine.stores(self.rank)
        if is_stored and not all(flags := self.read(name, keys)) and self.storm.is_calm:
            self.storm.wrong(f"{self.name}: stored, and not loaded: {flags} of {name}")

    def is_shared(self, name: str, keys: list[str]) -> bool:
        """Store, and tell whether each rank that shares the pages loads them. No other call may be
        on its way."""
        return self.write(name, keys, 0) and all(
            all(self.read(name, keys, rank))
            for engine in self.storm.engines
            for rank in engine.ranks
            if self.storm.share(engine, self.engine)
            and (rank.number == self.rank.number or engine.kind.mla)
        )

    # --- questions --------------------------------------------------------------------------

    def known(self, name: str, keys: Sequence[str]) -> int:
        """Return how many of these pages may have been stored, from the first one on."""
        storm = self.storm
        names = [storm.key(self.engine, self.rank, name, key) for key in keys]
        with storm.lock:
            return next((n for n, one in enumerate(names) if one not in storm.begun), len(names))

    def ask(self, name: str, keys: list[str]) -> None:
        """Ask for a prefix, and mostly load it."""
        with self.storm.timed("exists"):
            found = self.rank.storage.exists(keys, name)
        if found > self.known(name, keys):
            self.storm.wrong(f"{self.name}: {found} of {name} found, never stored")
        if found and self.rng.random() < 0.7:
            self.read(name, keys[:found])

    def ask_all(self, _name: str, keys: list[str]) -> None:
        """Ask for a prefix in all pools."""
        others = []
        if "draft" in self.rank.pools:
            others = [
                Transfer("draft", keys), Transfer("mamba", keys[-2:], hit_policy="trailing_pages")
            ]  # fmt: skip
        with self.storm.timed("exists_in_all"):
            hits = self.rank.storage.exists_in_all(keys, others)
        most = min(self.known(name, keys) for name in ["kv", *(one.name for one in others[:1])])
        if hits.pages > most:
            self.storm.wrong(f"{self.name}: {hits} of all pools, {most} were stored")

    def odd(self, name: str, keys: list[str]) -> None:
        """Make a call that SGLang should not make: a miss, at once."""
        pool, storage, there = self.rank.pools[name], self.rank.storage, self.pages(len(keys))
        slots = pool.indices(there)
        kind = self.rng.choice(("empty", "short", "long", "shifted", "twice"))
        with self.storm.timed(f"odd: {kind}"):
            if kind == "empty":
                assert storage.get([], slots[:0], name) == []
                assert storage.set([], slots[:0], None, name) == []
                assert storage.exists([], name) == 0
            elif kind == "short":
                assert not any(storage.get(keys, slots[1:], name))
            elif kind == "long":
                assert not any(storage.get([*keys, keys[0]], slots, name))
            elif kind == "twice":
                assert not any(self.read(name, [keys[0], *keys]))
            elif pool.page_size > 1:
                assert not any(storage.get(keys, slots + 1, name))

    def look_for_late_bytes(self) -> None:
        """Look whether our pages hold what we left there."""
        for name, pool in self.rank.pools.items():
            if bad := [page for page in self.own if not pool.holds(page, JUNK)]:
                self.storm.wrong(f"{self.name}: late bytes in pages {bad} of {name}")
