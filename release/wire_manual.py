"""The table of operators' verbs in `docs/wire.md`, written from `operator_verbs.OPERATOR_VERBS`.

`python -m release.wire_manual docs/wire.md` renews it; a test compares the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, SERVICES, TIERS, OperatorVerb

BEGIN = "<!-- Written by `python -m release.wire_manual docs/wire.md`. -->\n"
END = "<!-- end -->\n"


def table() -> str:
    """Return the table, with its head."""
    head = "| verb | answered by | request | reply | route | command |\n|---|---|---|---|---|---|\n"
    return head + "".join(map(_row, OPERATOR_VERBS))


def renewed(text: str) -> str:
    """Return the document with the table as it should be."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


def _row(verb: OperatorVerb) -> str:
    words = {SERVICES: "every service", TIERS: "every tier"}
    answered_by = words.get(tuple(verb.answered_by)) or ", ".join(verb.answered_by)
    messages = " | ".join(
        f"[{one.__name__}](#{one.__name__.lower()})" for one in (verb.request, verb.reply)
    )
    ways = f"`{verb.method} {verb.route}` | `kvbm {verb.command}`"
    return f"| `{verb.name}` | {answered_by.replace('-', ' ')} | {messages} | {ways} |\n"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(renewed(document.read_text()))
