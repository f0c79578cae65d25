"""The pod of a node: its directories, what it shares with engines, and the patch of an engine."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbm_cli.container import MEMORY_BESIDE_ARENA_BYTES
from kvbm_common.access.secret_files import make_private_directory
from kvbm_common.config.settings import Settings
from kvbm_common.service.footprint import INTERPRETER_BYTES
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.memory import parts_of

from tests.helm.chart import VALUES, Document, environ_of, of_kind, pod, render, run_tool
from tests.helm.checks import bytes_of, settings_of
from tests.helm.test_chart import MINORS, wrong_fields

DEADLINE_S = 20.0
DEPLOYMENT: Document = {
    "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "template": {
            "metadata": {"labels": {"app": "vllm"}},
            "spec": {
                "containers": [
                    {
                        "name": "engine", "image": "vllm", "args": ["--model=m"],
                        "env": [{"name": "HF_HOME", "value": "/models"}],
                        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    },
                    {"name": "other", "image": "other"},
                ],
                "volumes": [{"name": "models", "emptyDir": {}}],
            },
        },
    },
}  # fmt: skip


def directories_script() -> str:
    """Return the script of the init container."""
    [container] = pod(render(), "node").spec["initContainers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    script: str = container["command"][2]
    return script


def run_script(script: str, node: Path) -> None:
    """Run it over the directories below another one than /node, with the capability CHOWN alone."""
    words = ["setpriv", "--bounding-set=-all,+chown", "--inh-caps=-all", "sh", "-ec"]
    subprocess.run(
        [*words, script.replace("/node/", f"{node}/")], check=True, timeout=DEADLINE_S
    )  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_directories_become_those_of_the_services(tmp_path: Path) -> None:
    """Goal: services take them (mode 0700, user 10001); a second start and other modes do no harm.

    The container's root has the capability CHOWN and no other: no CAP_FOWNER, no CAP_DAC_OVERRIDE.
    """
    script = directories_script()
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o777)
    (tmp_path / "disk/block").write_text("stays")
    for _ in range(2):
        run_script(script, tmp_path)
        for name in ("run", "disk"):
            status = (tmp_path / name).stat()
            assert (status.st_uid, status.st_gid) == (10001, 10001)
            assert stat.S_IMODE(status.st_mode) == 0o700
    assert (tmp_path / "disk/block").read_text() == "stays"
    (tmp_path / "run").chmod(0o755)
    run_script(script, tmp_path)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_control_service_makes_its_own_directory(tmp_path: Path) -> None:
    """Goal: an emptyDir belongs to root and is open to the group; what services take is below."""
    for name in ("index", "metrics"):
        [container] = pod(render(), name).containers
        runtime = Path(environ_of(container, metadata_name="p")["KVBM_RUNTIME_DIR"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert str(runtime.parent) == mounts["run"]
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2777)
    make_private_directory(volume / "own", "KVBM_RUNTIME_DIR")


def test_what_compose_shares_the_pod_shares() -> None:
    """Goal: shared memory, processes and sockets are the node's, as engines have them."""
    spec = pod(render(), "node").spec
    assert spec["hostIPC"]
    assert spec["hostPID"]
    assert not spec["hostNetwork"]
    for container in spec["containers"]:
        assert {"name": "run", "mountPath": "/run/kvbm"} in container["volumeMounts"]
    for container in pod(render("--set", "node.hostPID=false"), "node").containers:
        assert "add" not in container["securityContext"]["capabilities"]


@pytest.mark.parametrize("block_bytes", [2_000_000, 100_000])
@pytest.mark.parametrize("bucket_blocks", [0, 3_000_000])
@pytest.mark.parametrize("disk_gb", [0, 4, 30_000])
@pytest.mark.parametrize("cache_gb", [1, 1_500])
def test_a_host_tier_has_memory_for_the_blocks_of_arena_disk_and_bucket(
    cache_gb: int, disk_gb: int, bucket_blocks: int, block_bytes: int
) -> None:
    """Goal: a node with terabytes of disk is not killed for the tables of its host tier.

    What the host tier declares stays below the limit, where blocks have the least size.
    """
    arguments = ["--set", f"node.hostTier.cacheGB={cache_gb},node.diskTier.cacheGB={disk_gb}"]
    arguments += ["--set-json", f"node.hostTier.blockMB={block_bytes / 1e6}"]
    if bucket_blocks:
        arguments += ["--set", "bucket.enabled=true,bucket.claimName=objects"]
        arguments += ["--set-json", f'settings={{"DYN_KVBM_OBJECT_NUM_BLOCKS":{bucket_blocks}}}']
    containers = {one["name"]: one for one in pod(render(*arguments), "node").containers}
    limit = bytes_of(containers["host-tier"]["resources"]["limits"]["memory"])
    limits = HostTierLimits(disk_bytes=int(disk_gb * 1e9), object_blocks=bucket_blocks)
    parts = parts_of(
        limits, slot_count=int(cache_gb * 1e9) // block_bytes,
        below_count=limits.below_count(block_bytes),
    )  # fmt: skip
    needed = INTERPRETER_BYTES + sum(parts.values()) + MEMORY_BESIDE_ARENA_BYTES
    beside = limit - int(cache_gb * 1e9)
    assert needed <= beside <= needed + 1_500_000_000


def patched(*arguments: str) -> tuple[Document, Document]:
    """Return an engine's Deployment after the chart's patch, and the values of the node's pod."""
    documents = render(*arguments)
    [patch] = [
        document["data"]["patch.yaml"]
        for document in of_kind(documents, "ConfigMap")
        if document["metadata"]["name"].endswith("-engine")
    ]
    done = run_tool(
        "kubectl", "patch", "--local", "--type", "strategic", "--patch", patch,
        "--filename", "-", "--output", "yaml", stdin=yaml.safe_dump(DEPLOYMENT),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made: Document = yaml.safe_load(done.stdout)
    return made, pod(documents, "node").spec


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_the_patch_of_an_engine_reaches_the_tiers(path: Path) -> None:
    """Goal: sockets, shared memory and namespaces are those of the node's pod; the rest stays."""
    made, node = patched("--values", str(path))
    spec = made["spec"]["template"]["spec"]
    engine, other = spec["containers"]
    for name in ("hostIPC", "hostPID", "hostNetwork"):
        assert spec.get(name, False) == node[name], name
    assert engine["args"] == ["--model=m"]
    assert {"name": "HF_HOME", "value": "/models"} in engine["env"]
    assert {"name": "models", "mountPath": "/models"} in engine["volumeMounts"]
    assert other == {"name": "other", "image": "other"}
    assert engine["securityContext"]["runAsUser"] == node["securityContext"]["runAsUser"]
    environ = environ_of(engine)
    [host_tier] = [one for one in node["containers"] if one["name"] == "host-tier"]
    of_tier = environ_of(host_tier, spec_nodeName="n")
    for name in ("KVBM_RUNTIME_DIR", "UCX_NET_DEVICES"):
        assert environ[name] == of_tier[name]
    assert host_path(spec, "kvbm-run") == host_path(node, "run")
    assert {"name": "kvbm-run", "mountPath": environ["KVBM_RUNTIME_DIR"]} in engine["volumeMounts"]
    assert spec["enableServiceLinks"] is False
    assert wrong_fields([made], MINORS[-1]) == []


def host_path(spec: Document, name: str) -> Any:
    """Return the directory of the node that a volume is."""
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == name]
    return volume["hostPath"]["path"]


def test_the_policy_lets_patched_engines_in() -> None:
    """Goal: the labels that the patch adds are those that the policy of the node lets in."""
    made, _ = patched()
    labels = made["spec"]["template"]["metadata"]["labels"]
    [policy] = [
        document
        for document in of_kind(render(), "NetworkPolicy")
        if document["metadata"]["name"] == "kvbm-node"
    ]
    chosen = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"]]
    assert any(one.items() <= labels.items() for one in chosen)


@pytest.mark.parametrize("bucket", ["bucket.name=kv", "bucket.claimName=kv"])
def test_the_host_tier_knows_the_room_below_it(bucket: str) -> None:
    """Goal: its bounds follow disk and bucket; the keys of the bucket are not its business."""
    below = f"node.diskTier.cacheGB=8,bucket.enabled=true,bucket.secretName=keys,{bucket}"
    settings = settings_of_host_tier("--set", below)
    assert settings.disk_cache_bytes == 8e9
    assert settings.object_enabled
    assert not settings.object_access_key
    assert not settings.object_secret_key
    settings = settings_of_host_tier("--set", "node.diskTier.cacheGB=0")
    assert settings.disk_cache_bytes == 0
    assert not settings.object_enabled


def settings_of_host_tier(*arguments: str) -> Settings:
    """Return the settings that the host tier of a node starts with."""
    node = pod(render(*arguments), "node")
    [container] = [one for one in node.containers if one["name"] == "host-tier"]
    return settings_of(node, container)


def test_the_argument_of_vllm_is_that_of_the_manual() -> None:
    """Goal: one text, in docs/vllm.md and here."""
    [argument] = [
        document["data"]["vllm-args"].strip()
        for document in of_kind(render(), "ConfigMap")
        if document["metadata"]["name"].endswith("-engine")
    ]
    name, _, text = argument.partition("=")
    manual = (Path(__file__).parents[2] / "docs/vllm.md").read_text()
    assert f"vllm serve MODEL {name} '{text}'" in manual


@pytest.mark.parametrize(
    ("assignment", "volume"),
    [
        ("bucket.claimName=kv", {"persistentVolumeClaim": {"claimName": "kv"}}),
        ("bucket.path=/mnt/kv", {"hostPath": {"path": "/mnt/kv", "type": "Directory"}}),
        ('bucket.path=/a "b"} # c', {"hostPath": {"path": '/a "b"} # c', "type": "Directory"}}),
    ],
)
def test_a_shared_file_system_takes_the_place_of_a_bucket(
    assignment: str, volume: dict[str, Any]
) -> None:
    """Goal: the object tier has the volume where its address says, and no keys; metrics hears of
    it."""
    documents = render("--set", "bucket.enabled=true,bucket.secretName=keys", "--set", assignment)
    assert [wrong_fields(documents, minor) for minor in MINORS] == [[], [], []]
    node = pod(documents, "node")
    assert [one for one in node.spec["volumes"] if one["name"] == "objects"] == [
        {"name": "objects"} | volume
    ]
    mounts = {
        container["name"]: mount["mountPath"] for container in node.containers
        for mount in container["volumeMounts"] if mount["name"] == "objects"
    }  # fmt: skip
    assert mounts == {"object-tier": "/var/lib/kvbm/objects"}
    [metrics] = pod(documents, "metrics").containers
    [objects] = [one for one in node.containers if one["name"] == "object-tier"]
    for container in (metrics, objects):
        environ = environ_of(container, spec_nodeName="n", metadata_name="p")
        assert environ["KVBM_OBJECT_URL"] == "file:///var/lib/kvbm/objects"
        assert not [name for name in environ if name.startswith("DYN_KVBM_OBJECT")]
