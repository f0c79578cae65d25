"""How many assertions the pure folders have: one for two functions, outside `check`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_tidy import CORES, PACKAGES, PURE_FOLDERS, ROOT

RATIO_MIN = 0.5
"""Assertions for a function, on average over a folder."""
FOLDERS = sorted({path.parent for path in CORES if path.parent.name in PURE_FOLDERS})
VIEWS = PACKAGES["kvbm_metrics"] / "core"
"""Functions that turn what others have said into views, and hold no state but samples and sums:
what an instance says may be wrong, and stops nothing."""
RATIO_OF_VIEWS_MIN = 0.25


def assertions_and_functions(text: str) -> tuple[int, int]:
    """Count assertions in functions, and functions, of a module.

    Every function counts: also a property, one of a single line, one inside another, and the
    signature of a protocol. Left out is `check`, which tests call, with all that is in it. An
    assertion that a value is there, or is of a type, and says no more, is one for the type checker,
    and does not count. Neither does one that is outside all functions.
    """
    assertions = functions = 0

    def visit(node: ast.AST, *, inside: bool) -> None:
        nonlocal assertions, functions
        if isinstance(node, ast.FunctionDef):
            if node.name == "check":
                return
            functions += 1
            inside = True
        elif isinstance(node, ast.Assert) and inside and not _is_for_types(node):
            assertions += 1
        for child in ast.iter_child_nodes(node):
            visit(child, inside=inside)

    visit(ast.parse(text), inside=False)
    return assertions, functions


def _is_for_types(node: ast.Assert) -> bool:
    """Tell whether an assertion without a message narrows a type, and does nothing else."""
    if node.msg is not None:
        return False
    test = ast.unparse(node.test)
    return test.endswith(" is not None") or test.startswith("isinstance(")


def counts_of(folder: Path) -> tuple[int, int]:
    """Count assertions and functions of a folder. Modules of checks are parts of a `check`."""
    modules = [path for path in folder.glob("*.py") if not path.stem.endswith("_checks")]
    counts = [assertions_and_functions(path.read_text()) for path in modules]
    return sum(one for one, _ in counts), sum(one for _, one in counts)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_pure_folder_has_an_assertion_for_two_functions(folder: Path) -> None:
    """A bug of a core stops the step that it is in, before wrong state is served."""
    assertions, functions = counts_of(folder)
    least = RATIO_OF_VIEWS_MIN if folder == VIEWS else RATIO_MIN
    assert assertions >= least * functions, f"{assertions} assertions, {functions} functions"


def test_all_pure_folders_together_have_an_assertion_for_two_functions() -> None:
    """Method: the folders, views included, and the names of blocks."""
    identity = assertions_and_functions((PACKAGES["kvbm_common"] / "identity.py").read_text())
    counts = [identity, *map(counts_of, FOLDERS)]
    assertions, functions = (sum(one) for one in zip(*counts, strict=True))
    assert assertions >= RATIO_MIN * functions, f"{assertions} assertions, {functions} functions"


COUNTED = """
assert 1 < 2
class Named(Protocol):
    def name(self) -> str: ...
class Core:
    @property
    def size(self): return 1
    def step(self, value):
        assert value is not None
        assert isinstance(value, int)
        assert self.table is not None, self.story()
        def inner(): assert value > 0
    def check(self):
        def inner(): assert self.size
        assert self.size
"""


def test_what_counts_as_a_function_and_as_an_assertion() -> None:
    """Method: a module with one of each kind."""
    assert assertions_and_functions(COUNTED) == (2, 4)
