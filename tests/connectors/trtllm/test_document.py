"""docs/trtllm.md shows what is there: its YAML, its commands, its names."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbm_common.config.declarations import settings_by_name
from kvbm_common.config.settings import Settings
from kvbm_connectors.trtllm import event_pump
from kvbm_connectors.trtllm.identity import refusal_of

from tests.connectors.trtllm.package import KvCacheConfig, LlmArgs, installed

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "trtllm.md").read_text()
KNOWN_TO_THE_ENGINE = {"free_gpu_memory_fraction", "event_buffer_max_size"}
"""Of `KvCacheConfig`, beside what our stand-in has."""


def shown() -> dict[str, Any]:
    """The configuration that the page tells to write."""
    [text] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_the_configuration_is_one_that_works() -> None:
    """Goal: who copies it is not refused. Without its line on partial reuse he would be."""
    cache = shown()["kv_cache_config"]
    ours = {name: value for name, value in cache.items() if name not in KNOWN_TO_THE_ENGINE}
    assert refusal_of(LlmArgs(kv_cache_config=KvCacheConfig(**ours))) == ""
    defaults = KvCacheConfig(enable_partial_reuse=True)  # As TensorRT-LLM has it.
    assert "enable_partial_reuse" in refusal_of(LlmArgs(kv_cache_config=defaults))
    assert cache["event_buffer_max_size"] > 0


def test_the_classes_are_where_it_says() -> None:
    """Goal: the engine finds what the configuration names, and what KVBM's users have written."""
    config = shown()["kv_connector_config"]
    with installed():
        module = importlib.import_module(config["connector_module"])
        leader = getattr(module, config["connector_scheduler_class"])
        worker = getattr(module, config["connector_worker_class"])
        assert leader.__name__ == "KvbmConnectorLeader"
        for name, wanted in re.findall(r"`(DynamoKVBMConnector(\w+))`", TEXT):
            assert getattr(module, name) is {"Leader": leader, "Worker": worker}[wanted]


def test_the_file_that_is_written_is_the_one_that_is_read() -> None:
    [path] = set(re.findall(r"`?(/tmp/\S+?\.yaml)", TEXT))
    commands = [
        *re.findall(r"^trtllm-serve .*$", TEXT, re.MULTILINE),
        *re.findall(r"^python3 -m dynamo\.trtllm .*$", TEXT, re.MULTILINE),
    ]
    assert [shlex.split(command)[-1] for command in commands] == [path, path]


def test_the_pump_takes_these_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: the command parses; what stops it here is the port that is not set."""
    [command] = re.findall(
        r"^python -m kvbm_connectors\.trtllm\.event_pump .*$", TEXT, re.MULTILINE
    )
    with pytest.raises(SystemExit):
        event_pump.main(shlex.split(command)[3:])
    assert "DYN_KVBM_TRTLLM_ZMQ_PORT says where to publish" in capsys.readouterr().err


def test_variables_and_their_defaults_exist() -> None:
    """Goal: no variable in the page that nobody reads, and no default that is another one."""
    declared = {setting.variable: name for name, setting in settings_by_name().items()}
    named = set(re.findall(r"`((?:DYN_)?KVBM_[A-Z_]+)", TEXT))
    assert named <= declared.keys()
    for variable, default in re.findall(r"^- `(\w+)` \((\d+)[):]", TEXT, re.MULTILINE):
        assert float(getattr(Settings(), declared[variable])) == float(default), variable


def test_counters_that_it_names_exist() -> None:
    """Goal: no counter in the page that nobody counts."""
    table = TEXT.split("| what | meaning |")[1].split("\n\n")[0]
    named = {name.split(".")[0] for name in re.findall(r"`([a-z_.A-Z]+)`", table)}
    code = "\n".join(
        path.read_text() for path in (ROOT / "connectors" / "kvbm_connectors").rglob("*.py")
    )
    reasons = {"corrupt", "lease_ended", "no_arena", "arena_changed", "KVBM_PROMISE_GB"}
    assert {name for name in named - reasons if f'"{name}' not in code} == set()


def test_it_says_that_it_has_not_run_in_the_engine() -> None:
    assert "**It has not run inside the engine.**" in TEXT
