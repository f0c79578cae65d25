"""What enters the computing of K and V enters a namespace: vLLM's configuration, field by field."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 2048}}  # fmt: skip
PLAIN: dict[str, Any] = {}
DIFFERENT: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "yarn": {"hf_overrides": YARN},
    "yarn, another length": {"hf_overrides": YARN, "max_model_len": 4096},
    "rope_theta": {
        "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    },
    "dtype": {"dtype": "float32"},
    "hf_overrides": {"hf_overrides": {"rms_norm_eps": 0.1}},
    "load_format": {"load_format": "safetensors"},
    "dummy weights": {"load_format": "dummy"},
    "loader": {"model_loader_extra_config": {"enable_multithread_load": True}},
    "ignore_patterns": {"ignore_patterns": ["other/**"]},
    "model_impl": {"model_impl": "transformers"},
    "attention": {"attention_config": {"flash_attn_version": 2}},
    "skipped layers": {"kv_cache_dtype_skip_layers": ["0"]},
    "a platform's": {"additional_config": {"fast": True}},
    "experts": {"moe_backend": "triton"},
    "linear layers": {"linear_backend": "triton"},
    "generation": {"override_generation_config": {"attn_temperature_tuning": True}},
    "trusted code": {"trust_remote_code": True},
    "a variable": {"environ": {"VLLM_CPU_INT4_W4A8": "1"}},
    "another variable": {"environ": {"VLLM_DISABLED_KERNELS": "MarlinLinearKernel"}},
}
SAME: dict[str, dict[str, Any]] = {
    "length, unscaled": {"max_model_len": 4096},
    "served name": {"served_model_name": "poet"},
    "seed": {"seed": 7},
    "sampling": {"generation_config": "vllm"},
    "scheduling": {"max_num_seqs": 3, "enable_chunked_prefill": True},
    "eager": {"enforce_eager": True},
    "memory": {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2**28},
    "optimisation": {"optimization_level": 0},
    "tokenizer": {"tokenizer_revision": "main"},
    "place of downloads": {"download_dir": "/nowhere"},
    "ports": {"master_port": 1, "data_parallel_rpc_port": 2,
              "environ": {"VLLM_PORT": "4000", "VLLM_HOST_IP": "127.0.0.2",
                          "VLLM_NIXL_SIDE_CHANNEL_PORT": "4001", "VLLM_DP_RANK": "0"}},
    "another connector": {"kv_transfer_config": {"kv_connector": "NixlConnector",
                                                 "kv_role": "kv_both", "kv_port": 3}},
    "lora": {"enable_lora": True, "max_loras": 2},
    "logs": {"environ": {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CACHE_ROOT": "/nowhere"}},
}  # fmt: skip


def namespaces(arguments: list[dict[str, Any]], **environ: str) -> list[str]:
    """One per engine, of a process of their own."""
    found = subprocess.run(
        [VLLM_PYTHON, "-m", "tests.vllm.namespace_process"],
        input=json.dumps(arguments).encode(), stdout=subprocess.PIPE, check=True, cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | environ,
    ).stdout  # fmt: skip
    answer: list[str] = json.loads(found)
    return answer


@pytest.fixture(scope="module")
def found(model: str) -> dict[str, str]:
    """The namespaces of all kinds, made in one process."""
    kinds = DIFFERENT | SAME
    return dict(
        zip(kinds, namespaces([{"model": model} | kinds[kind] for kind in kinds]), strict=True)
    )


@pytest.mark.parametrize("kind", [kind for kind in DIFFERENT if kind != "plain"])
def test_what_changes_k_and_v_changes_the_namespace(kind: str, found: dict[str, str]) -> None:
    """Each is apart from the plain one and from all others."""
    assert len(found[kind]) == 64
    assert [other for other in DIFFERENT if found[other] == found[kind]] == [kind]


@pytest.mark.parametrize("kind", list(SAME))
def test_what_does_not_leaves_the_namespace_alone(kind: str, found: dict[str, str]) -> None:
    """Engines that differ in it share their blocks."""
    assert found[kind] == found["plain"]


def test_another_life_elsewhere_has_the_same_name(
    model: str, tmp_path: Path, found: dict[str, str]
) -> None:
    """A process with other directories, ports, rank and instance: hosts share, restarts too."""
    places = {
        name: str(tmp_path) for name in ("HOME", "TMPDIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
    }
    arguments = {"model": model, "data_parallel_rpc_port": 7, "master_port": 8, "node_rank": 0}
    numbers = {"VLLM_PORT": "9000", "VLLM_DP_MASTER_PORT": "9001", "LOCAL_RANK": "1", "RANK": "1"}
    assert namespaces([arguments], **places, **numbers) == [found["plain"]]


def test_content_names_a_model_and_not_its_place(model: str, tmp_path: Path) -> None:
    """A copy shares; other weights of the same shapes, size and times do not; none: no name."""
    copy, other, empty = (tmp_path / place / Path(model).name for place in ("a", "b", "c"))
    for path in (copy, other, empty):
        shutil.copytree(model, path)
    weights = other / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-100_000:] = bytes(100_000)
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    (empty / "model.safetensors").unlink()
    first, same, tuned, unknown = namespaces(
        [{"model": str(path)} for path in (model, copy, other, empty)]
    )
    assert first == same != tuned
    assert unknown == "unreadable_weights"


def test_weights_that_are_not_the_model_s_files_have_no_name(model: str) -> None:
    """A loader that asks another process for them; one that reads the same files is allowed."""
    asked, read = namespaces(
        [{"model": model, "load_format": kind} for kind in ("modelexpress", "runai_streamer")]
    )
    assert asked == "unreadable_weights"
    assert len(read) == 64
