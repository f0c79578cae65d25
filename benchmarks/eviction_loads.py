"""Loads for eviction policies: requests as ids of blocks, drawn from a seed.

Each is another way to use a cache: some that LRU serves well, some that it cannot serve at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush

Ids = list[int]
Load = list[Ids]


class _Ids:
    """Ids that were not given before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Ids:
        self._next += count
        return list(range(self._next - count, self._next))


def chat(
    requests: int, seed: int, *, systems: int = 4, pause: float = 300, again: float = 0.7,
    grows: tuple[int, int] = (1, 8),
) -> Load:  # fmt: skip
    """Conversations after shared system prompts: each turn comes after a pause (log-normal, in
    mean times between new conversations), or never.
    """
    rng, ids = random.Random(seed), _Ids()
    prompts = [ids.take(rng.randint(2, 8)) for _ in range(systems)]
    turns: list[tuple[float, int, Ids]] = []
    load: Load = []
    now = 0.0
    for number in range(requests):
        now += rng.expovariate(1.0)
        heappush(turns, (now, number, list(rng.choice(prompts))))
        while turns and turns[0][0] <= now and len(load) < requests:
            due, who, history = heappop(turns)
            history = history + ids.take(rng.randint(*grows))
            load.append(history)
            if rng.random() < again and len(history) < 120:
                heappush(turns, (due + rng.lognormvariate(0, 0.8) * pause, who, history))
    return load


def agents(requests: int, seed: int) -> Load:
    """Tool loops: long prompts that grow a little and come back at once, many times; then never."""
    rng, ids = random.Random(seed), _Ids()
    prompts = [ids.take(rng.randint(8, 20)) for _ in range(8)]
    live: list[tuple[Ids, int]] = []
    load: Load = []
    while len(load) < requests:
        if not live or (len(live) < 60 and rng.random() < 0.15):
            live.append((rng.choice(prompts) + ids.take(rng.randint(1, 4)), rng.randint(1, 40)))
        busy = len(live) if rng.random() < 0.6 else max(1, len(live) // 8)
        chosen = rng.randrange(busy)
        history, left = live.pop(chosen)
        load.append(history)
        if left:
            live.insert(chosen, (history + ids.take(rng.randint(1, 3)), left - 1))
    return load


def pausing_agents(
    hours: float, seed: int, *, pause_s: float, burst: float
) -> list[tuple[float, Ids]]:
    """Agents that pause (log-normal, this median) after a burst of quick calls, `burst` on average
    beyond the first; and two requests in five that are never seen again. Each with its time in
    seconds.
    """
    rng, ids = random.Random(seed), _Ids()
    prompts = [ids.take(rng.randint(8, 20)) for _ in range(8)]
    load: list[tuple[float, Ids]] = []
    now = 0.0
    while (now := now + rng.expovariate(1 / (30 * (1 + burst)))) < hours * 3600:
        at, history = now, rng.choice(prompts) + ids.take(rng.randint(5, 40))
        for _ in range(1 + int(rng.expovariate(1 / 6))):
            for _ in range(1 + int(rng.expovariate(1 / burst) if burst else 0)):
                history = history + ids.take(rng.randint(1, 6))
                load.append((at, history))
                at += rng.uniform(2, 30)
            at += rng.lognormvariate(0, 0.5) * pause_s
    strangers = [(rng.uniform(0, hours * 3600), ids.take(rng.randint(10, 60)))
                 for _ in range(len(load) * 2 // 3)]  # fmt: skip
    return sorted(one for one in load + strangers if one[0] < hours * 3600)


def documents(requests: int, seed: int, *, count: int = 600, skew: float = 0.9) -> Load:
    """Questions about documents of Zipf-like popularity after one instruction."""
    rng, ids = random.Random(seed), _Ids()
    instruction = ids.take(3)
    known = [ids.take(rng.randint(4, 30)) for _ in range(count)]
    weights = [1 / (1 + rank) ** skew for rank in range(count)]
    drawn = rng.choices(known, weights, k=requests)
    return [instruction + document + ids.take(rng.randint(0, 2)) for document in drawn]


def scan(requests: int, seed: int) -> Load:
    """Chat, and one in three requests is a document that is never seen again."""
    return mixed(
        [chat(requests * 2 // 3, seed, pause=100), documents(requests // 3, seed, count=10**5,
         skew=0)], seed,
    )  # fmt: skip


def loop(requests: int, seed: int, *, items: int = 150, length: int = 10) -> Load:
    """The same requests round and round: a cache slightly smaller gets nothing from LRU."""
    return [
        [number % items * length + depth for depth in range(length)] for number in range(requests)
    ]


def noise(requests: int, seed: int, *, items: int = 800, length: int = 10) -> Load:
    """Each request as likely as every other: nothing can be learned."""
    rng = random.Random(seed)
    return [
        [first * length + depth for depth in range(length)]
        for first in rng.choices(range(items), k=requests)
    ]


def strangers(requests: int, seed: int) -> Load:
    """Nothing ever comes back, but for one instruction."""
    return documents(requests, seed, count=10**5, skew=0)


def shift(requests: int, seed: int) -> Load:
    """Four loads of other kinds, one after the other."""
    part = requests // 4
    return after([chat(part, seed), documents(part, seed), agents(part, seed),
                  chat(part, seed + 1, pause=40, again=0.9)])  # fmt: skip


def fashion(requests: int, seed: int) -> Load:
    """Documents, and every now and then others are popular."""
    return after([documents(requests // 4, seed + part) for part in range(4)])


def loops(requests: int, seed: int) -> Load:
    """Loops of several lengths, and between them what LRU serves well."""
    part = requests // 5
    return after([loop(part, seed), noise(part, seed, items=60), loop(part, seed, items=300),
                  chat(part, seed, pause=40), loop(part, seed, items=80, length=20)])  # fmt: skip


def mixed(loads: list[Load], seed: int) -> Load:
    """Several loads at once, each in its own order."""
    rng = random.Random(seed)
    order = [which for which, load in enumerate(loads) for _ in load]
    rng.shuffle(order)
    streams = [iter(load) for load in _apart(loads)]
    return [next(streams[which]) for which in order]


def after(loads: list[Load]) -> Load:
    """Several loads, one after the other."""
    return [ids for load in _apart(loads) for ids in load]


def _apart(loads: list[Load]) -> list[Load]:
    """The same loads without a common id."""
    return [
        [[(which << 40) + block for block in ids] for ids in load]
        for which, load in enumerate(loads)
    ]


LOADS: dict[str, Callable[[int, int], Load]] = {
    "chat": chat,
    "chat, long pauses": lambda n, seed: chat(n, seed, pause=1000, again=0.5),
    "chat, short pauses": lambda n, seed: chat(n, seed, pause=30, again=0.85),
    "chat, one system prompt": lambda n, seed: chat(n, seed, systems=1, again=0.6, grows=(5, 30)),
    "agents": agents,
    "documents": documents,
    "documents, flat": lambda n, seed: documents(n, seed, skew=0.5),
    "chat and scans": scan,
    "a loop": loop,
    "noise": noise,
    "strangers": strangers,
    "a shift": shift,
    "fashion": fashion,
    "loops and others": loops,
}
