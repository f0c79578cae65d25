"""Doors: which attributes of a core, or of its view, the modules around it use."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ("core", "_core")
VIEW = ("view", "_view")


def doors_used(source: str, names: Iterable[str] = CORE) -> dict[str, int]:
    """Return the attributes of everything with one of these names, each with its first line."""
    used: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        of = node.value
        name = of.id if isinstance(of, ast.Name) else getattr(of, "attr", "")
        if name in names:
            used[node.attr] = min(node.lineno, used.get(node.attr, node.lineno))
    return used


def imported(source: str, package: str) -> set[str]:
    """Return the modules of a package from which a module imports."""
    return {
        node.module.removeprefix(f"{package}.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package)
    }


def wrong_doors(folders: Iterable[str], doors: set[str], names: Iterable[str] = CORE) -> list[str]:
    """Return every place below some folders that uses another attribute of a core."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert paths, "there is nothing to look at"
    return [
        f"{path.relative_to(ROOT)}:{line}: {attribute}"
        for path in paths
        for attribute, line in doors_used(path.read_text(), names).items()
        if attribute not in doors
    ]
