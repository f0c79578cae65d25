"""The recipes of CONTRIBUTING.md, followed on a copy: what they say is enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parent.parent
COMMON = "libs/kvbm_common/kvbm_common"

NEW_VERB = {
    f"{COMMON}/wire/admin.py": [
        (
            "class LogLevelRequest(",
            "class TouchAllRequest(_Change, frozen=True, kw_only=True):\n"
            '    """Touch all blocks so many times."""\n\n'
            "    times: Annotated[int, Meta(ge=1, le=9)]\n\n\n"
            "class TouchAllReply(_Message, frozen=True, kw_only=True):\n"
            '    """So many touches were made."""\n\n'
            "    touched: Natural\n\n\n",
        ),
    ],
    f"{COMMON}/wire/operator_verbs.py": [
        (
            ")  # fmt: skip\n",
            "    OperatorVerb(\n"
            '        "touch_all", admin.TouchAllRequest, admin.TouchAllReply, "Touch them.",\n'
            '        given=(Given("times", "So many times.", argument="times"), *WHERE),\n'
            "    ),\n",
        ),
    ],
    f"{COMMON}/tier/admin.py": [
        (
            "from kvbm_common.wire.admin import (\n",
            "from kvbm_common.wire.admin import TouchAllReply, TouchAllRequest\n",
        ),
        (
            "            case _:\n                assert_never(request)\n",
            "            case TouchAllRequest():\n"
            "                return TouchAllReply(touched=request.times)\n",
        ),
    ],
}
"""What the recipe for a verb says, in code: file → text that goes before the last place of another.

The unions of step 1 are for mypy only, which does not run here.
"""


def followed(tmp_path: Path, changes: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    """Make the changes on a copy of the common library; returns the environment that has it."""
    shutil.copytree(ROOT / COMMON, tmp_path / COMMON, ignore=shutil.ignore_patterns("__pycache__"))
    for name, insertions in changes.items():
        path = tmp_path / name
        text = path.read_text()
        for before, inserted in insertions:
            head, found, tail = text.rpartition(before)
            assert found, f"{name} has no {before!r}: the recipe's test follows the code"
            text = head + inserted + found + tail
        path.write_text(text)
    paths = [str((tmp_path / COMMON).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def files_of(recipe: str) -> set[str]:
    """Return the files that a recipe names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split(f"## Recipe: {recipe}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. .*(?:\n   .*)*", section, re.MULTILINE)
    return set(re.findall(r"`([\w/.]+\.(?:py|md))`", "\n".join(steps)))


@pytest.mark.slow
def test_a_new_verb_is_three_files(tmp_path: Path) -> None:
    """1. Change what the recipe names. 2. See the verb on every way to it, and in the documents."""
    assert files_of("a new verb of operators") == set(NEW_VERB)
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tests/new_verb.py"],  # "release" is not that of `tests`.
        capture_output=True, text=True, check=False,
        env=followed(tmp_path, NEW_VERB), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert seen["nats"] == {"v": 1, "touched": 3}
    for way, touched in (("http", 4), ("command", 5)):
        [outcome] = seen[way]
        assert (outcome["kind"], outcome["reply"]) == ("host-tier", {"touched": touched})
    assert seen["openapi"] == ["/v1/touch_all"]
    assert seen["asyncapi"] == [f"{tier}-tier-touch_all" for tier in ("disk", "host", "object")]
    assert len(seen["manual"]) == 1
