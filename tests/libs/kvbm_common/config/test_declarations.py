"""The declared settings: each has a variable of its own, with one of our prefixes, and is read."""

from __future__ import annotations

import ast
from pathlib import Path

from kvbm_common.config.declarations import all_settings

ROOT = Path(__file__).parents[4]
PRODUCT = ("libs", "services", "connectors")


def test_every_setting_is_told_apart() -> None:
    variables = [declared.variable for declared in all_settings()]
    assert len(set(variables)) == len(variables) > 30
    foreign = {name for name in variables if not name.startswith(("DYN_KVBM_", "KVBM_"))}
    assert foreign == {"ETCD_ENDPOINTS"}, "Dynamo's name"


def test_every_setting_is_read() -> None:
    """Goal: no setting is accepted, checked and documented, and then changes nothing.

    Such a name belongs into `NO_EFFECT`, with the reason.
    """
    paths = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 400
    read = {
        node.attr
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert [declared.variable for declared in all_settings() if declared.name not in read] == []
