"""Private names: which attributes with a leading underscore a test reads of objects not its own."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
BY_TEXT = (
    "getattr", "setattr", "hasattr", "delattr", "object", "patch", "attrgetter", "methodcaller",
)  # fmt: skip
"""Calls that name an attribute by a text, those of `monkeypatch` and `mock` too."""
MAYBE_PRIVATE = re.compile(r"[.'\"]_[^\W_]|^\s*(from|import) .*\W_[^\W_]|^\s*_\w+,$", re.MULTILINE)
"""Found in every module with a private attribute, a text that begins as one, or such an import."""


def is_private(name: str) -> bool:
    """Return whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every private attribute that a module takes from another class.

    A class may use what it or a base of its in the tests defines, of `self` and of its other
    instances. Imports of private names, and names in the text of a `getattr`, count as well.
    """
    if MAYBE_PRIVATE.search(source):
        tree = ast.parse(source)
        yield from _names_in(tree, frozenset(), _classes_of(tree))


def _names_in(
    node: ast.AST, own: frozenset[str], classes: dict[str, ast.ClassDef]
) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.ClassDef):
        own |= _defined_by(node, classes)
    elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
        yield node.lineno, node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from ((node.lineno, one.name) for one in node.names if is_private(one.name))
    elif isinstance(node, ast.Import):
        parts = [part for one in node.names for part in one.name.split(".")]
        yield from ((node.lineno, part) for part in parts if is_private(part))
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        given = [one.value for one in node.args if isinstance(one, ast.Constant)]
        texts = [text.rpartition(".")[2] for text in given if isinstance(text, str)]
        if called in BY_TEXT:
            yield from ((node.lineno, text) for text in texts if is_private(text))
    for inner in ast.iter_child_nodes(node):
        yield from _names_in(inner, own, classes)


def _classes_of(tree: ast.AST) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@functools.cache
def _all_classes() -> dict[str, ast.ClassDef]:
    """Return every class of the tests by its name; of two with one name, either."""
    found: dict[str, ast.ClassDef] = {}
    for path in sorted(TESTS.rglob("*.py")):
        found |= _classes_of(ast.parse(path.read_text()))
    return found


def _defined_by(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> frozenset[str]:
    """Return the private names that a class and its bases in the tests define."""
    names: set[str] = set()
    for field in node.body:
        for target in getattr(field, "targets", [getattr(field, "target", None)]):
            names |= {target.id} if isinstance(target, ast.Name) else set()
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                names.add(name)
            case _:
                pass
    for base in node.bases:
        known = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
        found = classes.get(known) or _all_classes().get(known)
        if found is not None and found is not node:
            names |= _defined_by(found, classes)
    return frozenset(names)
