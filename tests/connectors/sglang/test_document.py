"""The document shows what the tests run. It needs no SGLang."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kvbm_connectors.sglang
import pytest
from kvbm_common.config.declarations import settings_by_name
from kvbm_common.config.settings import Settings
from kvbm_connectors.sglang.options import Options, stream_of

from tests.sglang.harness import ROOT, extra_of

DOCUMENT = (ROOT / "docs" / "sglang.md").read_text()


def test_the_extra_config_is_that_of_the_tests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: who copies a line from the document runs what was tested."""
    (text,) = re.findall(r"--hicache-storage-backend-extra-config '(.*)'", DOCUMENT)
    extra = json.loads(text)
    tested = extra_of(Settings.load({}, {"runtime_dir": tmp_path}))
    assert extra.pop("hicache_storage_pass_prefix_keys") is True
    assert extra == {name: tested[name] for name in extra}
    assert extra["module_path"] == kvbm_connectors.sglang.__name__
    assert extra["class_name"] in kvbm_connectors.sglang.__all__
    Options.read(json.loads(text), {})
    assert "is not a setting" not in caplog.text


def test_variables_exist() -> None:
    """Goal: no variable in the document that nobody reads."""
    declared = {setting.variable for setting in settings_by_name().values()}
    named = set(re.findall(r"`?((?:DYN_)?KVBM_[A-Z_]+)", DOCUMENT))
    assert len(named) > 3
    assert named <= declared


def test_the_events_can_be_followed() -> None:
    (text,) = re.findall(r"--kv-events-config '(.*)'", DOCUMENT)
    stream = stream_of(text, 1)
    assert stream.endpoint == "tcp://127.0.0.1:5558"
    assert stream.replay_endpoint == "tcp://127.0.0.1:5658"


def test_counters_that_the_document_names_exist() -> None:
    """Goal: no counter in the document that nobody counts."""
    table = DOCUMENT.split("| what | meaning |")[1].split("\n\n")[0]
    named = {
        name.removeprefix("kv.").split(".")[0] for name in re.findall(r"`([a-z_.A-Z]+)`", table)
    }
    code = "\n".join(
        path.read_text() for path in (ROOT / "connectors" / "kvbm_connectors").rglob("*.py")
    )
    assert len(named) > 8
    assert {name for name in named - {"link"} if f'"{name}' not in code} == set()
