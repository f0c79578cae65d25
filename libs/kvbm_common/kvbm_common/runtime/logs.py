"""Logging: one line per event on standard error, and a limiter for lines that would repeat.

A line is text for people, or a JSON object for machines (`KVBM_LOG_FORMAT=json`). What it is about
goes into `extra` under the names of `IDS`; both forms have it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence

REPEAT_S = 60.0
"""A line of one kind is written at most once a minute; the next one says how many were not."""
KINDS_MAX = 256
"""Kinds that are remembered; the rest share one, because a log line must never end a service."""
OTHER = "other"
CORRUPT_MAX = 16
"""Wrong blocks that are named at a time; each has a story, too."""
IDS = ("kind", "request", "engine", "lookup", "block", "trace")
"""Keys of a line's subjects: a limiter's kind, an engine's request, a block by its hash, …"""


class TextFormatter(logging.Formatter):
    """Time, level, source, module, message, ids."""

    def __init__(self, source: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {source} %(name)s: %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line without a traceback. A kind is in the message already."""
        ids = "".join(f" {name}={value}" for name, value in _ids(record) if name != "kind")
        return super().formatMessage(record) + ids


class JsonFormatter(logging.Formatter):
    """A log line as a JSON object, with the time in UTC."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, even if its message has several."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "source": self._source,
            "module": record.name,
            "message": record.getMessage(),
        }
        line.update(_ids(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _ids(record: logging.LogRecord) -> list[tuple[str, object]]:
    return [(name, record.__dict__[name]) for name in IDS if name in record.__dict__]


def set_up(source: str, level: str, form: str = "text") -> None:
    """Send every log line of this process to standard error, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(source) if form == "json" else TextFormatter(source))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # The client's own lines repeat ours, once per attempt.
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def corrupt(logger: logging.Logger, hashes: Sequence[str]) -> None:
    """Say which blocks did not have their checksum, one line each."""
    for block in hashes[:CORRUPT_MAX]:
        logger.warning("a block did not have its checksum, and is dropped", extra={"block": block})
    if len(hashes) > CORRUPT_MAX:
        logger.warning("and so are %d more", len(hashes) - CORRUPT_MAX)


class OncePerKind:
    """Writes the first line of a kind, then at most one per minute with the count between."""

    def __init__(
        self, logger: logging.Logger, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock_s = clock_s
        self._next_s: dict[str, float] = {}
        self._withheld: dict[str, int] = {}

    def warning(self, kind: str, message: str, **ids: object) -> None:
        """Log a warning about `ids`, or count it silently."""
        self._write(logging.WARNING, kind, message, ids)

    def info(self, kind: str, message: str) -> None:
        """Log what a start brings with it and ends by itself, or count it silently."""
        self._write(logging.INFO, kind, message, {})

    def _write(self, level: int, kind: str, message: str, ids: dict[str, object]) -> None:
        now_s = self._clock_s()
        if kind not in self._next_s and len(self._next_s) >= KINDS_MAX:  # One more: `other`.
            kind = OTHER
        if now_s < self._next_s.get(kind, 0.0):
            self._withheld[kind] = self._withheld.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + REPEAT_S
        withheld = self._withheld.pop(kind, 0)
        suffix = f" (and {withheld} more of this kind)" if withheld else ""
        extra = {"kind": kind} | ids
        self._logger.log(level, "%s: %s%s", kind, message, suffix, extra=extra)
