"""The table of ports in docs/security.md: what the settings, the doctor and compose say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from kvbm_cli.doctor.access_checks import access_checks
from kvbm_cli.doctor.gather import gather
from kvbm_common.config.declarations import all_settings
from kvbm_common.config.settings import Settings

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "docs/security.md").read_text()
SECTION = SECURITY.split("## Ports\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (?!port|---)(.*?) \|.*\| (.*?) \|$", SECTION, re.MULTILINE)
LISTENING = {name: port for port, names in ROWS for name in re.findall(r"`([A-Z_]+)`", names)}
"""Variable → what stands in the table's first column."""
FILES = sorted((ROOT / "compose").glob("*.yml"))
COMPOSE = "".join(path.read_text() for path in FILES)
SETTINGS = {setting.variable: setting for setting in all_settings()}
NAMES_A_PLACE = r"(_PORT|_ENDPOINTS?|_BIND|NATS_URL|REGISTRY_URL)$"


def test_every_setting_that_names_a_port_is_listed() -> None:
    """Goal: a setting that comes to open a port, or to connect to one, is in the section."""
    placed = {name for name in SETTINGS if re.search(NAMES_A_PLACE, name)}
    assert len(placed) >= 13
    assert {name for name in placed if f"`{name}`" not in SECTION} == set()


@pytest.mark.parametrize("variable", sorted(LISTENING))
def test_port_is_the_default(variable: str) -> None:
    """Goal: the first column is what a stack without settings does."""
    setting = SETTINGS.get(variable)
    if setting is None:
        assert f"${{{variable}:-" in COMPOSE, variable
        return
    column = LISTENING[variable]
    if port := re.search(r"(?:^|:)(\d{2,})$", setting.default_text):
        assert column == port[1]
    elif name := re.search(r"([\w-]+\.sock)$", setting.default_text):
        assert column == f"none: `{name[1]}`"
    elif variable.endswith("_PORT"):
        assert setting.default_text in ("0", "–", "")
        assert column.startswith("none")


def test_what_the_doctor_lists_is_in_the_table() -> None:
    """Goal: an operator finds each `access: …` of the doctor explained."""
    settings = Settings.load({}, {})
    found = [one.check for one in access_checks(gather(settings), settings)]
    places = [name.removeprefix("access: ") for name in found if name.startswith("access: ")]
    planned = [place for place in places if "//" in place or place.endswith(":6880")]
    assert len(planned) == 6
    for place in planned:
        known = re.findall(r"[\w-]+\.sock$|\d+$", place)
        assert any(known[0] in port for port, _ in ROWS), place


def test_ports_that_compose_publishes_are_listed() -> None:
    """Goal: a service that comes to publish a port is in the table, under the variable it has."""
    texts = [
        text
        for path in FILES
        for service in (yaml.safe_load(path.read_text()).get("services") or {}).values()
        for text in service.get("ports", ())
    ]
    assert len(texts) >= 5
    assert {text.rpartition(":")[2] for text in texts} <= {port for port, _ in ROWS}
    moved = {name for text in texts for name in re.findall(r"KVBM_\w+", text)}
    assert moved == LISTENING.keys() - SETTINGS.keys()
