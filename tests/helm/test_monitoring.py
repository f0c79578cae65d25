"""Rules, dashboard and scrape of the chart: the same as those of compose."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.helm.chart import CHART, ROOT, of_kind, pod, render

ALERTS = ROOT / "compose/prometheus/alerts.yml"
DASHBOARD = ROOT / "compose/grafana/dashboards/kvbm.json"
PROMETHEUS = yaml.safe_load((ROOT / "compose/prometheus/prometheus.yml").read_text())
VALUES = str(Path(__file__).parent / "values/tls-nkeys.yaml")


def test_there_is_one_copy_of_rules_and_dashboard() -> None:
    """Goal: nobody edits one of two files: those of the chart are links."""
    for name, original in (("alerts.yml", ALERTS), ("kvbm.json", DASHBOARD)):
        assert (CHART / "files" / name).is_symlink()
        assert (CHART / "files" / name).resolve() == original


def test_rules_and_dashboard_arrive_unchanged() -> None:
    """Goal: what looks like a template in an annotation, `{{ $labels.host }}`, is Prometheus'."""
    documents = render("--values", VALUES)
    [rules] = of_kind(documents, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(ALERTS.read_text())
    [dashboard] = [
        document["data"]["kvbm.json"]
        for document in of_kind(documents, "ConfigMap")
        if document["metadata"]["name"].endswith("-dashboard")
    ]
    assert json.loads(dashboard) == json.loads(DASHBOARD.read_text())


def test_a_pod_monitor_scrapes_what_prometheus_of_compose_scrapes() -> None:
    """Goal: the rules and the dashboard find job, labels and token as in compose."""
    documents = render("--values", VALUES)
    [monitor] = of_kind(documents, "PodMonitor")
    [job] = PROMETHEUS["scrape_configs"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    labels = pod(documents, "metrics").labels
    assert labels[monitor["spec"]["jobLabel"]] == job["job_name"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [target] = job["static_configs"][0]["targets"]
    assert pod(documents, "metrics").ports[endpoint["port"]] == int(target.split(":")[1])
    assert endpoint["honorLabels"] == job["honor_labels"]
    assert endpoint["path"] == "/metrics"
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["key"] == Path(job["authorization"]["credentials_file"]).name
    assert credentials["name"] == "own-scrape"


def test_nothing_of_an_operator_is_there_unless_it_is_wanted() -> None:
    """Goal: a cluster without the Prometheus operator takes the chart as it comes."""
    assert {document["apiVersion"].partition("/")[0] for document in render()} == {
        "v1", "apps", "policy", "networking.k8s.io",
    }  # fmt: skip
