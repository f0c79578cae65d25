"""`python -m benchmarks.onlooker URL`: asks what an open live page and a Prometheus ask.

A process of its own, so that its own work is not mistaken for theirs, and as little of it as can
be: a browser and a Prometheus would run on other machines.
"""

from __future__ import annotations

import http.client
import itertools
import sys
import threading
import time
from urllib.parse import urlsplit

PAGE = ("/v1/status", "/v1/tiers", "/v1/workers")
SCRAPE = "/metrics"
EXPLAIN = "/v1/explain?missed=true&limit=50"
EVENTS = "/v1/events?per_second=10"
DEADLINE_S = 30


def main(address: str) -> None:
    """Until it is killed. Each connection is kept, as a browser keeps it."""
    threading.Thread(target=read_events, args=(address,), daemon=True).start()
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    for turn in itertools.count():
        for path in (*PAGE, SCRAPE, *([EXPLAIN] if turn % 3 == 0 else [])):
            ask(connection, path)
        if turn == 0:
            print("looking", flush=True)
        time.sleep(1)  # As the page does.


def ask(connection: http.client.HTTPConnection, path: str) -> None:
    """One answer, read to its end. Who was stopped for a while finds the connection closed."""
    try:
        connection.request("GET", path)
        connection.getresponse().read()
    except (http.client.HTTPException, OSError):
        connection.close()


def read_events(address: str) -> None:
    """What the page shows of them, again when the feed has ended."""
    while True:
        connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        try:
            connection.request("GET", EVENTS)
            feed = connection.getresponse()
            while feed.read1():
                pass
        except (http.client.HTTPException, OSError):
            pass
        connection.close()
        time.sleep(1)


if __name__ == "__main__":
    main(urlsplit(sys.argv[1]).netloc)
