"""Mutate modules and list the survivors: `python -m tests.mutation slots leases`.

mutmut runs in a copy of the sources, `.mutants/<module>`, where all packages lie side by side as it
wants them. What is known is kept there: an interrupted run goes on where it was, and after a change
of a function only the mutants of that function run again. After a change of tests, `--again` runs
the survivors of before once more; `--list` only tells what is known.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.modules import SUBJECTS, Subject

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".mutants"
TOOLS = ROOT / ".venv-mutmut"
"""Where mutmut is, without what `.venv` has already: see requirements.txt beside this file."""
PACKAGES = (
    "libs/kvbm_common/kvbm_common", "services/index/kvbm_index",
    "services/host_tier/kvbm_host_tier", "services/disk_tier/kvbm_disk_tier",
    "services/metrics/kvbm_metrics", "connectors/kvbm_connectors",
)  # fmt: skip
MUTMUT = "import sys; sys.path.append(sys.argv.pop(1)); from mutmut.__main__ import cli; cli()"
SHOW = """
import json, sys
sys.path.append(sys.argv[1])
from mutmut.mutation.diff_apply import get_diff_for_mutant
names = json.load(sys.stdin)
json.dump({name: get_diff_for_mutant(name, path=sys.argv[2]) for name in names}, sys.stdout)
"""
KILLED = {1, 3}
TIMED_OUT = {24, -24, 36, 152, 255}


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that no test has noticed."""

    name: str
    line: int
    before: str
    after: str


def main() -> int:
    """Run what is named, all modules by default; returns 1 when mutmut has failed."""
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if not (TOOLS / "mutmut").is_dir():
        print(f"{TOOLS.name} is missing: `make mutants` installs it", file=sys.stderr)
        return 1
    for name in wanted or SUBJECTS:
        subject, directory = SUBJECTS[name], WORK / name
        if "--list" not in sys.argv and not mutate(subject, directory, again="--again" in sys.argv):
            print(f"mutmut has failed: {directory / 'log'}", file=sys.stderr)
            return 1
        report(name, subject, directory)
    return 0


def mutate(subject: Subject, directory: Path, *, again: bool) -> bool:
    """Run the mutants that are left, and with `again` the survivors; False: mutmut has failed."""
    lay_out(subject, directory)
    names = alive(results(subject, directory)) if again else []
    if names and not run_mutmut(directory, names):
        return False
    # After a change of its settings mutmut has forgotten what it knew.
    return (again and None not in results(subject, directory).values()) or run_mutmut(directory)


def run_mutmut(directory: Path, names: Sequence[str] = ()) -> bool:
    """Run these mutants, or those of which nothing is known."""
    command = ["nice", "-n", "10", sys.executable, "-c", MUTMUT, str(TOOLS), "run"]
    command += ["--max-children", os.environ.get("MUTANTS_JOBS", "1"), *names]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with (directory / "log").open("w") as log:
        run = subprocess.run(command, cwd=directory, env=environ, stdout=log, check=False)
    return not run.returncode


def lay_out(subject: Subject, directory: Path) -> None:
    """Copy what has changed, and write mutmut's configuration."""
    for package in PACKAGES:
        target = directory / "src" / Path(package).name
        for source in (ROOT / package).rglob("*"):
            if source.is_file() and "__pycache__" not in source.parts:
                copy_changed(source, target / source.relative_to(ROOT / package))
    for source in (ROOT / "tests").rglob("*"):
        if source.is_file() and "__pycache__" not in source.parts:
            copy_changed(source, directory / source.relative_to(ROOT))
    tests = [path for path in subject.tests if (ROOT / path).exists()]
    settings = {
        "source_paths": ["src"],
        "only_mutate": [f"src/{subject.path}"],
        "do_not_mutate_patterns": [r"^\s*log\.", r"^\s*self\._limiter\."],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:schemathesis",
                                "-p", "tests.mutation.quick_hypothesis"],
        "pytest_add_cli_args_test_selection": tests,
        "timeout_multiplier": 10.0,
        "use_git_change_detection": False,
    }  # fmt: skip
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    tomllib.loads(text)
    (directory / "pyproject.toml").write_text(text)


def copy_changed(source: Path, target: Path) -> None:
    """Copy a file unless it is there: by its time mutmut knows what has changed."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    stale = [parent for parent in target.parents if parent.name == "src"]
    if stale:  # mutmut copies a package once.
        mutated = stale[0].parent / "mutants" / target.relative_to(stale[0].parent)
        if mutated.exists():
            shutil.copyfile(source, mutated)
            os.utime(mutated, (0, 0))


def results(subject: Subject, directory: Path) -> dict[str, int | None]:
    """The exit code of the tests for each mutant; None where they have not run."""
    meta = json.loads((directory / "mutants/src" / f"{subject.path}.meta").read_text())
    codes: dict[str, int | None] = meta["exit_code_by_key"]
    return codes


def alive(codes: dict[str, int | None]) -> list[str]:
    """The mutants that no test has noticed."""
    return [name for name, code in codes.items() if code not in KILLED | TIMED_OUT]


def report(name: str, subject: Subject, directory: Path) -> None:
    """Print the figures, and every survivor with its line."""
    codes = results(subject, directory)
    survivors = list(survivors_of(alive(codes), subject, directory))
    texts = [one for one in survivors if is_text_of_an_assertion(one)]
    counted = Counter("killed" if code in KILLED else "timed out" if code in TIMED_OUT else "alive"
                      for code in codes.values())  # fmt: skip
    total = len(codes) - len(texts)
    killed = counted["killed"] + counted["timed out"]
    print(f"{name}: {killed} of {total} killed ({100 * killed / total:.1f} %)")
    print(f"  {counted['timed out']} by time-out; {len(texts)} texts of assertions left out")
    for one in survivors:
        if one not in texts:
            state = {0: "", None: " (did not run)", 5: " (no test)", 33: " (no test)"}
            code = codes[one.name]
            print(f"  {subject.root}/{subject.path}:{one.line}{state.get(code, f' ({code})')}")
            print(f"    - {one.before}\n    + {one.after}\n    {one.name}")


def survivors_of(names: list[str], subject: Subject, directory: Path) -> Iterator[Survivor]:
    """Find where each mutant differs from the source."""
    command = [sys.executable, "-c", SHOW, str(TOOLS), f"src/{subject.path}"]
    shown = subprocess.run(
        command, cwd=directory, input=json.dumps(names), capture_output=True, text=True, check=True
    )
    lines_of = function_lines(ROOT / subject.root / subject.path)
    for name, diff in sorted(json.loads(shown.stdout).items()):
        yield survivor(name, diff.splitlines()[2:], lines_of)


def survivor(name: str, diff: list[str], lines_of: dict[str, int]) -> Survivor:
    """Read one diff of a function."""
    found = re.match(r"@@ -(\d+)", diff[0])
    assert found, diff
    offset = int(found[1]) - 1
    for line in diff[1:]:
        if line.startswith(("-", "+")):
            break
        offset += 1
    before = " ".join(line[1:].strip() for line in diff[1:] if line.startswith("-"))
    after = " ".join(line[1:].strip() for line in diff[1:] if line.startswith("+"))
    function = re.sub(r"__mutmut_\d+$", "", name.rpartition(".")[2])
    return Survivor(name, lines_of[function] + offset, before, after)


def function_lines(path: Path) -> dict[str, int]:
    """The first line of each function, decorators included, by mutmut's names."""
    lines: dict[str, int] = {}
    for node in ast.parse(path.read_text()).body:
        owner = f"xǁ{node.name}ǁ" if isinstance(node, ast.ClassDef) else "x_"
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
                lines[owner + function.name] = first
    return lines


def is_text_of_an_assertion(one: Survivor) -> bool:
    """Whether only the message differs: what a human reads when the mistake is there already."""
    try:
        before, after = ast.parse(one.before).body[0], ast.parse(one.after).body[0]
    except (SyntaxError, IndexError):
        return False
    if not isinstance(before, ast.Assert) or not isinstance(after, ast.Assert):
        return False
    return ast.dump(before.test) == ast.dump(after.test)


if __name__ == "__main__":
    sys.exit(main())
