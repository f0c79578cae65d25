"""`python -m benchmarks.onlooker URL`: asks what an open live page and a Prometheus ask.

A process of its own, so that its own work is not mistaken for theirs, and as little of it as can
be: a browser and a Prometheus would run on other machines. It looks from a line `look` on its stdin
to a line `rest`, and says either when it has done so.
"""

from __future__ import annotations

import http.client
import itertools
import socket
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

PAGE = ("/v1/status", "/v1/services", "/v1/tiers", "/v1/workers")
SCRAPE = "/metrics"
EXPLAIN = "/v1/explain?missed=true&limit=50"
HISTORY = "/v1/history"
EVENTS = "/v1/events?per_second=10"
DEADLINE_S = 30
PERIOD_S = 1.0
"""The page's."""


class Look:
    """A page that is open and a Prometheus that scrapes, until `end`."""

    def __init__(self, address: str, turns: Iterator[int]) -> None:
        self._address, self._turns = address, turns
        self._feed = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        self._feed.request("GET", EVENTS)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._read_events, self._ask)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Close the page."""
        self._ended.set()
        if self._feed.sock is not None:
            self._feed.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._feed.close()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=DEADLINE_S)
        for turn in self._turns:
            rare = [EXPLAIN] * (turn % 3 == 0) + [HISTORY] * (turn % 10 == 0)
            for path in (*PAGE, SCRAPE, *rare):
                connection.request("GET", path)
                connection.getresponse().read()
            if self._ended.wait(PERIOD_S):
                connection.close()
                return

    def _read_events(self) -> None:
        """What the page shows of them."""
        feed = self._feed.getresponse()
        try:
            while feed.read1():
                pass
        except (http.client.HTTPException, OSError):
            assert self._ended.is_set(), "the feed has ended by itself"


def main(address: str) -> None:
    """Do as told, until there is nobody to tell it."""
    look: Look | None = None
    turns = itertools.count()
    for line in sys.stdin:
        if look is not None:
            look.end()
        look = Look(address, turns) if line == "look\n" else None
        print(line, end="", flush=True)


if __name__ == "__main__":
    main(urlsplit(sys.argv[1]).netloc)
