"""values.schema.json: every value is in it, what is wrong is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kvbm_common.config.declarations import all_settings

from tests.helm.chart import CHART, Refused, environ_of, pods, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PLACED = {"KVBM_HOST", "KVBM_INSTANCE", "KVBM_RUNTIME_DIR", "KVBM_SHM_DIR", "KVBM_STATE_DIR"}
"""Where a pod is, and where its directories are."""
ENDS = ("_FILE", "_TOKEN", "_NUM_BLOCKS", "_ENDPOINT")
"""Of settings that name a file, a secret, a place of engines, or a size that is a value."""
ALL = (
    "--set", "bucket.enabled=true,bucket.name=kv,bucket.secretName=keys,bucket.endpoint=http://s3",
    "--set", "etcd.url=etcd://e:2379,node.peerDevices=eth1,index.partitions=2",
)  # fmt: skip


def left_out(names: set[str]) -> set[str]:
    """Return the settings that are no values: chart's own, a secret's, a file's, or a place's."""
    own = {
        name for one in pods(render(*ALL)) for container in one.containers
        for name in environ_of(container, spec_nodeName="n", metadata_name="p")
    }  # fmt: skip
    return {name for name in names if name in own | PLACED or name.endswith(ENDS)}


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("node.hostTier.cacheGb=8", ("/node/hostTier", "'cacheGb' not allowed")),
        ("nodes.gpu=true", ("'nodes' not allowed",)),
        ("settings.KVBM_EVICTON_POLICY=lru", ("/settings", "'KVBM_EVICTON_POLICY' not allowed")),
        ("settings.KVBM_NATS_URL=tls://a", ("/settings", "'KVBM_NATS_URL' not allowed")),
        ("settings.KVBM_ADMIN_TOKEN=12345678", ("/settings", "'KVBM_ADMIN_TOKEN' not allowed")),
        ("index.replicas=two", ("/index/replicas", "want integer")),
        ("index.partitions=0", ("/index/partitions",)),
        ("node.hostTier.cacheGB=0", ("/node/hostTier/cacheGB",)),
        ("node.hostTier.resources.limits.memory=4Gi", ("/node/hostTier/resources/limits/memory",)),
        ("node.runtimeDir=run", ("/node/runtimeDir", "'run' does not match")),
        ("nats.replicas=2", ("/nats/replicas", "1, 3, 5")),
        ("nats.enabled=false", ("/nats/url",)),
        ("nats.url=tls://elsewhere:4222", ("/nats/url",)),
        ("bucket.enabled=true", ("bucket.name, bucket.claimName and bucket.path",)),
        ("bucket.enabled=true,bucket.name=kv,bucket.path=/kv", ("one of bucket.name",)),
        ("bucket.enabled=true,bucket.path=/kv/../etc", ("/bucket/path",)),
        ("image.digests.nats=latest", ("/image/digests/nats", "sha256")),
        ("etcd.url=http://etcd:2379", ("/etcd/url", "etcd://")),
        ("fullnameOverride=Cache", ("/fullnameOverride",)),
        ("fullnameOverride=1cache", ("/fullnameOverride",)),
        ("node.runtimeDir=/run/../etc", ("/node/runtimeDir",)),
        ("node.runtimeDir=/etc", ("/node/runtimeDir",)),
        ("node.runtimeDir=/run/", ("/node/runtimeDir",)),
        ("nats.replicas=1,nats.streamReplicas=3", ("nats.streamReplicas is 3, and nats.replicas",)),
        ("nats.streamReplicas=5", ("nats.streamReplicas is 5, and nats.replicas only 3",)),
        ("node.affinity.nodeAfinity.x=1", ("/node/affinity", "'nodeAfinity' not allowed")),
        ("node.affinity.podAffinity.required=1", ("/node/affinity/podAffinity", "'required'")),
        ("node.hostTier.cacheGB=1000000001", ("/node/hostTier/cacheGB", "maximum")),
        ("nats.enabled=false,nats.url=tls://me:secret@nats:4222", ("/nats/url", "not match")),
        ("etcd.url=etcd://me:secret@etcd:2379", ("/etcd/url", "not match")),
        ("node.hostTier.port=6883", ("port 6883 is that of host-tier and of disk-tier",)),
        ("networkPolicy.operators[0].podSelector.labels.a=b", ("podSelector", "'labels' not")),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(assignment: str, told: tuple[str, ...]) -> None:
    """Goal: a typo does not become a default; the message says where it is."""
    with pytest.raises(Refused) as refused:
        render("--set", assignment)
    for text in told:
        assert text in str(refused.value)


def test_a_value_of_null_is_refused_or_changes_no_kind() -> None:
    """Goal: `null` takes a default away. What cannot do without it says so, by its name."""
    usual = {(one["kind"], one["metadata"]["name"]) for one in render()}
    for path, value in defaults(yaml.safe_load((CHART / "values.yaml").read_text())):
        complaint, documents = "", []
        try:
            documents = render("--set", f"{path}=null")
        except Refused as refused:
            complaint = str(refused)
        if complaint:
            assert f"missing property '{path.rpartition('.')[2]}'" in complaint, path
            continue
        assert value in ("", [], {}) or isinstance(value, dict), path
        assert {(one["kind"], one["metadata"]["name"]) for one in documents} == usual, path


def defaults(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of every value and section, with what it is; no amounts, no labels."""
    for name, value in values.items():
        yield f"{path}{name}", value
        if isinstance(value, dict) and name not in ("resources", "engines", "labels"):
            yield from defaults(value, f"{path}{name}.")


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    """Goal: neither file has a name that the other has not."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def names(schema: dict[str, Any], given: Any, path: str = "") -> None:
        if not isinstance(given, dict) or "properties" not in schema or path == "/settings":
            return
        if path.endswith(("resources", "digests")):
            return
        missing = set(schema["properties"]) ^ set(given)
        assert missing <= {"global"}, f"{path}: {missing}"
        for name, value in given.items():
            names(schema["properties"][name], value, f"{path}/{name}")

    names(SCHEMA, values)


def test_settings_of_the_schema_are_those_of_the_manual() -> None:
    """Goal: a setting that is new is a value at once, or is left out for a reason."""
    known = {setting.variable for setting in all_settings()}
    open_ones = set(SCHEMA["properties"]["settings"]["properties"])
    assert open_ones <= known
    missing = known - open_ones
    assert missing - left_out(missing) == {
        # Of `kvbm up`; of an engine; with files that no volume has; of another user's etcd.
        "KVBM_HOST_TIERS", "KVBM_TENANT", "KVBM_DISK_KEYS", "KVBM_OBJECT_URL", "KVBM_ETCD_USER",
        "KVBM_SERVICE_BIND", "KVBM_METRICS_BIND", "DYN_KVBM_METRICS_PORT", "ETCD_ENDPOINTS",
    }  # fmt: skip


def test_numbers_are_written_as_settings_take_them() -> None:
    """Goal: a million is 1000000: helm's numbers would be 1e+06."""
    values = ("--set-json", 'settings={"KVBM_EXPLAIN_REQUESTS":1000000,"KVBM_EVENTS_GB":0.5}')
    for one in pods(render(*values, "--set-json", "node.hostTier.cacheGB=1500000")):
        for container in one.containers:
            if one.name != "nats":
                environ = environ_of(container, spec_nodeName="n", metadata_name="p")
                assert environ["KVBM_EXPLAIN_REQUESTS"] == "1000000"
                assert environ["KVBM_EVENTS_GB"] == "0.5"
            if container["name"] == "host-tier":
                assert environ["DYN_KVBM_CPU_CACHE_GB"] == "1500000"
