"""docs/kubernetes.md: every command of the page, as far as it goes without a cluster.

`helm` lines are rendered, `kvbm` lines are run, and `kubectl` runs against a server that is not
there: it looks at words, options and files first.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helm.chart import CHART, NAMESPACE, ROOT, of_kind, pods, render, run_tool, tool
from tests.helm.checks import complaints

DOCUMENT = ROOT / "docs/kubernetes.md"
NODES = "\"$(kubectl get nodes -o jsonpath='{.items[*].metadata.name}')\""
DEADLINE_S = 60.0
NO_SERVER = """
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: ""}}]
current-context: none
"""


def commands() -> list[str]:
    """Return the lines of the page that are typed, in their order."""
    return re.findall(r"^ {4}(\S.*)$", DOCUMENT.read_text(), re.MULTILINE)


def test_the_page_has_lines_of_three_programs() -> None:
    """Goal: none is left out below."""
    found = {line.split()[0] for line in commands()}
    assert found == {"helm", "kubectl", "kvbm"}
    assert NODES in "\n".join(commands())


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("helm ")])
def test_helm_takes_the_line(line: str) -> None:
    """Goal: values that exist, and a chart at that path; what comes out has no complaint."""
    words = shlex.split(line)
    if words[1] == "uninstall":
        assert run_tool("helm", *words[1:], "--help").returncode == 0
        return
    assert words[1:3] in (["install", "kvbm"], ["upgrade", "--install"])
    chart, *options = words[words.index("deploy/helm/kvbm") :]
    assert (ROOT / chart).samefile(CHART)
    assert complaints(render(*[word for word in options if word != "--reuse-values"])) == []
    checked = run_tool("helm", *words[1:], "--help")
    assert checked.returncode == 0, checked.stderr


def test_kvbm_and_kubectl_take_the_lines(tmp_path: Path) -> None:
    """Goal: credentials come as the page says, and kubectl fails for want of a server alone."""
    (tmp_path / "config").write_text(NO_SERVER)
    environ = os.environ | {
        "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "config"),
        "PATH": f"{Path(tool('kubectl')).parent}:{ROOT / '.venv/bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    ran = 0
    for line in commands():
        if line.startswith("helm "):
            continue
        done = subprocess.run(
            ["bash", "-c", line.replace(NODES, '"a b.internal"')], cwd=tmp_path, env=environ,
            timeout=DEADLINE_S, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if line.startswith("kvbm "):
            assert done.stdout.strip() == str(tmp_path / "kvbm-creds/kube-secrets.json"), line
        else:
            assert done.returncode != 0
            assert "refused" in done.stderr, f"{line}: {done.stderr}"
        ran += 1
    assert ran > 15


def test_names_on_the_page_are_those_of_the_chart() -> None:
    """Goal: objects, ports and Secrets that the page names are rendered."""
    text = DOCUMENT.read_text()
    everything = render("--set", "bucket.enabled=true,bucket.name=kv")
    names = {document["metadata"]["name"] for document in everything}
    for kind, listed in re.findall(r"^\| ([A-Z]\w+) `([\w-]+)`", text, re.MULTILINE):
        assert listed in {one["metadata"]["name"] for one in of_kind(everything, kind)}
    for kind, name in re.findall(r" (daemonset|deploy|service|configmap)[/ ](kvbm-\w+)", text):
        assert name in names, f"{kind} {name}"
    ports = {number for one in pods(everything) for number in one.ports.values()}
    assert {int(port) for port in re.findall(r"\b6\d{3}\b", text)} <= ports
    assert f"--namespace {NAMESPACE}" not in text


def test_notes_name_the_command_for_the_secrets() -> None:
    """Goal: what helm prints after an installation is the page's, for this release."""
    done = run_tool(
        "helm", "install", "blocks", str(CHART), "--namespace", "x", "--dry-run=client"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:")[1]
    assert "kvbm kube-secrets --out ~/kvbm-creds --prefix blocks-kvbm --namespace x" in notes
    assert "hostIPC: true" in notes
    assert "--kv-transfer-config=" in notes
    status = notes.index("exec -n x deploy/blocks-kvbm-metrics -- kvbm status")
    for name in ("daemonset/blocks-kvbm-node", "deploy/blocks-kvbm-metrics"):
        assert 0 <= notes.find(f"rollout status -n x {name}") < status
