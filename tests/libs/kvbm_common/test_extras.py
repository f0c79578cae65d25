"""A package that is not installed is named with the command that installs it, in one line."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import kvbm_connectors.sglang
import kvbm_connectors.vllm
import pytest
from kvbm_common import extras
from kvbm_common.config.settings import Settings
from kvbm_common.cuda.runtime import CudaUnavailable, CupyRuntime
from kvbm_common.errors import ConfigError
from kvbm_common.extras import ExtraMissing
from kvbm_common.service.process import make_registry
from kvbm_common.service.tracing import tracer_of
from kvbm_disk_tier.objects.shell.service import check

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a module one that is not installed, for modules that are still to be imported."""

    def hide(module: str, *importers: str) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        for importer in importers:
            monkeypatch.delitem(sys.modules, importer, raising=False)

    return hide


def test_an_etcd_registry_without_etcd3_names_the_extra(without: Any) -> None:
    without("etcd3", "kvbm_common.registry.etcd", "kvbm_common.registry.etcd_client")
    settings = Settings.load({}, {"registry_url": "etcd://127.0.0.1:1"})
    bus: Any = object()
    with pytest.raises(ExtraMissing) as missing:
        make_registry(settings, bus)
    assert str(missing.value) == (
        "KVBM_REGISTRY_URL needs etcd3: pip install 'kvbm-stack[etcd]'"
    )  # fmt: skip
    assert isinstance(missing.value, ConfigError), "the service ends with 2"


def test_an_otlp_endpoint_without_opentelemetry_names_the_extra(without: Any) -> None:
    without(EXPORTER)
    settings = Settings.load({}, {"otlp_endpoint": "http://127.0.0.1:1"})
    with pytest.raises(ExtraMissing) as missing:
        tracer_of(settings, "host-tier")
    assert str(missing.value) == (
        "KVBM_OTLP_ENDPOINT needs opentelemetry: pip install 'kvbm-stack[otel]'"
    )


def test_a_bucket_without_boto3_names_the_extra(without: Any) -> None:
    """A directory needs nothing."""
    without("boto3")
    with pytest.raises(ExtraMissing) as missing:
        check(Settings.load({}, {"object_url": "s3://bucket"}))
    assert str(missing.value) == "DYN_KVBM_OBJECT_BUCKET needs boto3: pip install 'kvbm-stack[s3]'"
    check(Settings.load({}, {"object_url": "file:///mnt/kv"}))


def test_a_gpu_without_cupy_names_the_extra(without: Any) -> None:
    without("cupy")
    with pytest.raises(CudaUnavailable, match=r"cupy: pip install 'kvbm-stack\[cuda12\]'") as no:
        CupyRuntime()
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("package", "name"),
    [(kvbm_connectors.vllm, "KvbmConnector"), (kvbm_connectors.sglang, "KvbmHiCacheStorage")],
)
def test_an_adapter_without_its_engine_says_what_to_install(
    without: Any, package: Any, name: str
) -> None:
    """Goal: a user of the adapter sees what to install, not the engine's module alone."""
    engine = package.__name__.rpartition(".")[2]
    module = {"vllm": "connector", "sglang": "backend"}[engine]
    without(engine, f"{package.__name__}.{module}")
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'kvbm-stack\[{engine}\]'"):
        getattr(package, name)


def test_the_command_is_that_of_the_example() -> None:
    assert doctest.testmod(extras).failed == 0
