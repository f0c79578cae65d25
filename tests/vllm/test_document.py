"""The document shows what the tests run. It needs no vLLM."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from tests.vllm.harness import ROOT
from tests.vllm.launched import line_of, lines_of_readme, ports_in_a_row
from tests.vllm.server import TRANSFER
from tests.vllm.test_disaggregated import BOTH, NIXL

DOCUMENT = ROOT / "docs" / "vllm.md"
GUIDES = (ROOT / "docs" / "vllm_guides.md").read_text()
EXAMPLES = ROOT / "examples" / "vllm"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.sh") if path.name != "common.sh")


def without_test_machine(config: object) -> object:
    """The same, without what the tests add for a machine with two cores."""
    text = json.dumps(config).replace(json.dumps(NIXL["kv_connector_extra_config"]), "null")
    return json.loads(text.replace(', "kv_connector_extra_config": null', ""))


def test_the_configurations_are_those_of_the_tests() -> None:
    """Goal: who copies a line from the document runs what was tested."""
    found = re.findall(r"--kv-transfer-config '(.*)'", DOCUMENT.read_text())
    assert [json.loads(text) for text in found] == [
        TRANSFER,
        without_test_machine(BOTH),
        without_test_machine(NIXL),
    ]


def test_counters_that_the_document_names_exist() -> None:
    """Goal: no counter in the document that nobody counts."""
    table = DOCUMENT.read_text().split("| what | meaning |")[1].split("\n\n")[0]
    named = {name.split(".")[0] for name in re.findall(r"`([a-z_.A-Z]+)`", table)}
    code = "\n".join(
        path.read_text() for path in (ROOT / "connectors" / "kvbm_connectors").rglob("*.py")
    )
    reasons = {"deadline", "lease_ended", "corrupt", "peer_lost", "arena_changed"}
    reasons.add("refused_request")
    missing = {name for name in named - reasons if f'"{name}' not in code}
    assert missing - {"link"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_shows_what_the_document_shows(script: Path, tmp_path: Path) -> None:
    """Goal: a script passes the configurations of the document, and is a line of the README.

    Commands that print their arguments stand in the places of `kvbm`, `vllm` and `python3`.
    """
    variables, words = line_of(script.name)
    assert words[0] == str(script.relative_to(ROOT))
    assert f"`{script.name}`" in GUIDES
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    for name in ("kvbm", "vllm", "python3"):
        command = tmp_path / name
        command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexec sleep 60\n')
        command.chmod(0o755)
    curl = tmp_path / "curl"
    curl.write_text("#!/bin/sh\n")
    curl.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOGS": str(tmp_path / "logs")}
    limited = ["timeout", "--signal", "INT", "5", *words, "--more"]
    done = subprocess.run(limited, env=environ | variables, cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert "serving on http://127.0.0.1:8000" in done.stdout, done.stderr
    printed = {path.stem: path.read_text().split("\n") for path in (tmp_path / "logs").iterdir()}
    assert printed.pop("kvbm") == ["up", ""]
    printed.pop("proxy", None)
    for worker, arguments in printed.items():
        found = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        expected = NIXL if "decode" in worker else BOTH if "prefill" in worker else TRANSFER
        assert found == without_test_machine(expected), worker
        assert arguments[0] == "serve"
        assert "--more" in arguments


def test_every_script_is_run_by_a_test() -> None:
    """Goal: no script, and no line of the README, that nothing has run."""
    tests = (ROOT / "tests" / "vllm" / "test_examples.py").read_text()
    assert len(SCRIPTS) == 4
    for script in SCRIPTS:
        assert f'"{script.name}"' in tests
    typed = [line for line in lines_of_readme() if not line.startswith(("curl", "kvbm"))]
    assert {Path(shlex.split(line)[-2]).name for line in typed} == {path.name for path in SCRIPTS}
    lines = re.findall(r"^ {4}(\S.*)$", GUIDES, re.MULTILINE)
    assert lines[0] in lines_of_readme()


def test_variables_of_the_scripts_are_explained() -> None:
    """Goal: each variable of a script is in the guide, with its default."""
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \| ([^|]*) \|", GUIDES, re.MULTILINE)
    explained = {
        name: value
        for names, values in rows
        for name, value in zip(re.findall(r"\w+", names), values.split(", "), strict=False)
    }
    text = "".join(path.read_text() for path in EXAMPLES.glob("*.sh"))
    for name, default in re.findall(r"([A-Z_]+)=\$\{\1:-([^}']*)\}", text):
        shown = GUIDES if name == "TP" else explained[name]
        assert default in shown.replace("`", ""), name


def test_ports_of_a_script_are_its_own() -> None:
    """A row of ports shares none with the row after it, nor with a port drawn later."""
    rows = [ports_in_a_row(5), ports_in_a_row(4), ports_in_a_row(3)]
    ports = {first + more for first, count in zip(rows, (5, 4, 3), strict=True)
             for more in range(count)}  # fmt: skip
    ports.add(free_port())
    assert len(ports) == 5 + 4 + 3 + 1
