"""Wrong lines of the command `kvbm`, and a process that types many of them.

`python -m tests.integration.wrong_lines` takes the lines as JSON on standard input and answers with
what became of each. They run in one process, which is what starts a hundred times faster.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from unittest import mock

from kvbm_common.config.declarations import all_settings

A = "a" * 32
LONG = "x" * 5000
TEXTS = ("", "nope", "HOST", "host,disk", "é", "\x1b[2J", "../..", "a b", "[bold]", "\n", LONG, "*")
TOKENS = ("", "a b", "*", ">", "a.b", "é", "\x1b[2J", "x" * 65, "[bold]", "\n", LONG)
INTEGERS = ("", "x", "1.5", "1e3", "0x10", "é", "nan", "inf", "9" * 5000, "1,2", "[1]", "\n")
COUNTS = (*INTEGERS, "-1")
FLOATS = ("", "x", "1,5", "é", "--", "1.2.3", "[1]", "nan", "inf", "-1", "\n", LONG)
NAMES = ("", "xyz", "f" * 3, "f" * 33, "g" * 32, "0x" + "f" * 30, "é" * 32, "../" * 11, "\n", LONG)
DIGESTS = (*NAMES, "f" * 63, "f" * 65)
URLS = ("foo", "http://", "http://[::1", "ftp://h", "http://a b", "http://h:99999", "http://h:x",
        "file:///etc/passwd", "://", "http://\x1b[2J", "http://é:1", "http://h:0")  # fmt: skip
NATS_URLS = ("foo", "nats://", "nats://[::1", "ftp://h", "nats://h:99999", "nats://h:x", "http://h",
             "nats://a b", "://", LONG)  # fmt: skip
JSONS = ("[", "{", "x", "@/no/such/file", "@/", "\x00", "'", "[" * 5000, "nul")
MISSING = "/no/such/directory/file"

Line = Sequence[str]


@dataclass(frozen=True, slots=True)
class Case:
    """A line, and which word of it, or which variable, is wrong."""

    words: list[str]
    name: str
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a line."""

    code: int
    output: str
    errors: str
    trace: str = ""


RIGHT: Mapping[str, Line] = {
    "up": (), "serve": (), "config": (), "doctor": (), "audit": (), "block": (A,), "creds": (),
    "demo": (), "drain": ("--tier=host",), "events": ("tail", "--no-follow"),
    "evict": (A, "--tier=host"), "explain": (), "forget": ("h",), "filter": ("--tier=disk", "--on"),
    "index": ("where", A), "jobs": (), "loglevel": ("info",),
    "kube-secrets": ("--out=OUT", "--nodes=n"),
    "nats-config": ("--out=OUT", "--hosts=h"),
    "nats-streams": (), "pin": (A, "--tier=host"), "pins": (), "policy": ("lru", "--tier=host"),
    "prefetch": (A,), "reset": (A, "--tier=host"), "resize": ("1", "--tier=host"), "services": (),
    "simulate": ("--trace=TRACE",), "status": (), "tiers": (), "undrain": ("--tier=host",),
    "unpin": ("1", "--tier=host", "--host=h"), "workers": (),
}  # fmt: skip
"""Each command with what it cannot do without."""
TIER_VERBS = ("drain", "undrain", "evict", "reset", "filter", "pin", "policy", "resize", "unpin")
OPTIONS: Mapping[tuple[str, str], Sequence[str]] = {
    **{(name, "--tier"): TEXTS for name in TIER_VERBS},
    **{(name, option): TOKENS for name in (*TIER_VERBS, "loglevel", "prefetch")
       for option in ("--host", "--instance")},
    **{(name, "--url"): URLS for name in (
        *TIER_VERBS, "audit", "block", "explain", "forget", "jobs", "loglevel", "pins", "prefetch",
        "services", "status", "tiers", "workers")},
    ("doctor", "--url"): URLS,
    **{(name, "--nats"): NATS_URLS for name in ("up", "events", "index", "nats-streams")},
    **{(name, "--deadline-s"): FLOATS for name in ("evict", "reset", "resize", "prefetch")},
    **{(name, "--prefix"): NAMES for name in ("evict", "reset")},
    **{(name, "--namespace"): DIGESTS for name in ("evict", "reset")},
    ("up", "--only"): TEXTS,
    ("audit", "--last"): (*COUNTS, "0", "1001"),
    ("explain", "--last"): (*COUNTS, "0", "100001"),
    ("demo", "--requests"): (*COUNTS, "0"), ("demo", "--engines"): (*COUNTS, "0", "17"),
    ("demo", "--host-gb"): FLOATS, ("demo", "--disk-gb"): FLOATS,
    ("demo", "--block-kib"): (*COUNTS, "3", "5", "16385"), ("demo", "--seed"): INTEGERS,
    ("demo", "--tensor-parallel"): (*COUNTS, "0", "9", "7"), ("demo", "--device"): TEXTS,
    ("demo", "--json"): (MISSING,), ("demo", "--trace"): ("", "/", MISSING, LONG),
    ("events", "--host"): [text for text in TOKENS if text != "*"],
    ("events", "--source"): [text for text in TOKENS if text != "*"],
    ("events", "--kind"): [text for text in TEXTS if text != "*"],
    ("events", "--since"): (*TEXTS, "-1s", "#x", "#-1", "1e9999s", "9" * 400 + "h", "2020-13-01"),
    ("filter", "--pass-count"): (*COUNTS, "0"), ("filter", "--decay-s"): (*FLOATS, "0", "1e18"),
    ("index", "--tokens"): JSONS, ("index", "--namespace"): JSONS,
    ("index", "--weights"): ("x", "host=", "host=x", "=1", "host=1,disk", "host=nan"),
    ("loglevel", "--kind"): TEXTS,
    ("nats-config", "--instances"): (*COUNTS, "65"), ("nats-config", "--listen"): TEXTS[1:9],
    ("nats-config", "--hosts"): ("a b", "*", "a.b", ">", "é", "\x1b[2J", LONG),
    ("nats-config", "--tenants"): ("a b", "*", "a.b", ">", "é", "\x1b[2J", LONG),
    ("kube-secrets", "--nodes"): ("*", "é", "\x1b[2J", LONG, "a_b", ".a", "A", "-n"),
    ("kube-secrets", "--prefix"): ("a b", "*", "é", "\x1b[2J", LONG, "A", "-n"),
    ("kube-secrets", "--namespace"): ("a b", "*", "é", "\x1b[2J", LONG, "A", "-n"),
    ("kube-secrets", "--out"): ("", "/proc/nothing", "/dev/null/x", LONG),
    **{(name, "--names"): ("a b", "é", "*", "a..", ".", "-a", "\x1b[2J", LONG)
       for name in ("kube-secrets", "nats-config")},
    ("nats-config", "--out"): ("", "/proc/nothing", "/dev/null/x", LONG),
    ("pin", "--ttl-s"): (*FLOATS, "0", "1e18"),
    ("prefetch", "--tokens"): JSONS, ("prefetch", "--namespace"): JSONS,
    ("simulate", "--trace"): ("", "/", MISSING, "/dev/null/x", LONG),
    ("simulate", "--capacity"): ("", "x", "-1", "1%%", "1,,2", "é", "%", "\n", LONG, "9" * 5000),
    ("simulate", "--policy"): TEXTS,
    ("simulate", "--requests"): (*COUNTS, "+", "--", "½", " ", "0b1", "1 2"),
    ("simulate", "--json"): ("/", MISSING),
}  # fmt: skip
ARGUMENTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "serve": ("service", TEXTS), "block": ("hash", NAMES), "evict": ("hashes", NAMES),
    "reset": ("hashes", NAMES), "pin": ("hashes", NAMES), "prefetch": ("hashes", NAMES),
    "creds": ("creds", TEXTS[1:]), "events": ("events", TEXTS), "index": ("question", TEXTS),
    "jobs": ("job", NAMES), "loglevel": ("level", TEXTS), "policy": ("policy", TEXTS),
    "forget": ("host", TOKENS), "resize": ("slots", COUNTS), "unpin": ("pin", COUNTS),
}  # fmt: skip
"""The first argument of a command: how errors call it, and wrong values of it."""
WITHOUT_SETTINGS = ("simulate", "demo")
"""Commands that take no variable, or not before they have started something."""
WRONG_SETTINGS = ("\x01", "-5", "maybe", "nan", "x" * 300, "", "1e400", "://", "é")


def cases(command: str, count: int) -> list[Case]:
    """Return so many wrong lines of a command or more, the same ones every time."""
    found = [*_options(command), *_arguments(command), *_shapes(command)]
    if command not in WITHOUT_SETTINGS:
        settings = list(_settings(command))
        more = max(12, count - len(found))
        found += random.Random(command).sample(settings, min(len(settings), more))
    return found


def _options(command: str) -> Iterator[Case]:
    for (name, option), values in OPTIONS.items():
        if name == command:
            others = [word for word in RIGHT[command] if not word.startswith(f"{option}=")]
            removal = option in ("--prefix", "--namespace") and command in ("evict", "reset")
            kept = [word for word in others if not (removal and word == A)]
            if option in ("--tokens", "--namespace") and command in ("index", "prefetch"):
                kept = ["match"] if command == "index" else []
                kept += ["--tokens=1"] if option == "--namespace" else []
            if option == "--weights":
                kept = ["score", A]
            for value in values:
                yield Case([command, *kept, f"{option}={value}"], option)


def _arguments(command: str) -> Iterator[Case]:
    called, values = ARGUMENTS.get(command, ("", ()))
    others = RIGHT[command][0 if command in ("serve", "creds", "jobs") else 1 :]
    for value in values:
        yield Case([command, *others, "--", value], called)


def _shapes(command: str) -> Iterator[Case]:
    """Yield lines that the command line itself refuses."""
    right = [command, *RIGHT[command]]
    for wrong in ("--no-such", "-Z", "--no-such=1", "--é"):
        yield Case([*right, wrong], wrong.partition("=")[0])
    if command not in ("evict", "reset", "pin", "prefetch", "index"):
        yield Case([*right, "more", "than", "enough"], "than")


def _settings(command: str) -> Iterator[Case]:
    line = [command, *(["index"] if command == "serve" else RIGHT[command])]
    for one in all_settings():
        if one.only_for:
            continue
        for value in WRONG_SETTINGS:
            try:
                one.parser.parse(value)
            except ValueError:
                if value:
                    yield Case(line, one.variable, {one.variable: value})


def end_of(words: list[str], environ: Mapping[str, str]) -> Ended:
    """Run one line here, as the command does."""
    from kvbm_cli import main

    output, errors, trace, code = io.StringIO(), io.StringIO(), "", 0
    with (
        mock.patch.object(sys, "argv", ["kvbm", *words]),
        mock.patch.dict(os.environ, environ),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            trace = traceback.format_exc()
    return Ended(code, output.getvalue(), errors.getvalue(), trace)


def main() -> None:
    """Answer the lines of standard input."""
    lines = json.load(sys.stdin)
    json.dump([asdict(end_of(line["words"], line["environ"])) for line in lines], sys.stdout)


if __name__ == "__main__":
    main()
