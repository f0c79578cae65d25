"""What an object tier's settings must be before it starts."""

from __future__ import annotations

import pytest
from kvbm_cli.stack import SERVICES
from kvbm_cli.stack_processes import processes_of
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions
from kvbm_disk_tier.objects.shell.service import check


def test_an_object_tier_without_a_bucket_is_refused() -> None:
    """Before it enters itself anywhere; without the switch nothing is asked for."""
    check(Settings.load({}))
    check(Settings.load({"DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "b"}))
    with pytest.raises(ConfigError, match="DYN_KVBM_OBJECT_BUCKET"):
        check(Settings.load({"DYN_KVBM_OBJECT_ENABLED": "true"}))


def test_a_stack_runs_one_where_it_is_enabled() -> None:
    """`kvbm up` starts it by the switch alone."""
    assert "object-tier" in SERVICES
    assert processes_of("object-tier", Settings.load({})) == {}
    enabled = Settings.load({"DYN_KVBM_OBJECT_ENABLED": "true"})
    assert processes_of("object-tier", enabled) == {"object-tier": {}}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DYN_KVBM_OBJECT_ENDPOINT", "localhost:9000"),
        ("DYN_KVBM_OBJECT_ENDPOINT", "http://h/path"),
        ("DYN_KVBM_OBJECT_NUM_BLOCKS", "0"),
        ("KVBM_OBJECT_PREFIX", "/kv"),
        ("KVBM_OBJECT_PREFIX", "kv//x"),
        ("KVBM_OBJECT_TTL_S", "-1"),
    ],
)
def test_values_that_cannot_be_are_refused(variable: str, value: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=variable):
        Settings.load({variable: value})


def test_keys_are_in_no_text() -> None:
    """They go to NIXL and boto3, and nowhere else."""
    settings = Settings.load(
        {"DYN_KVBM_OBJECT_ACCESS_KEY": "hush1", "DYN_KVBM_OBJECT_SECRET_KEY": "hush2"}
    )
    options = BucketOptions(bucket="b", access_key="hush1", secret_key="hush2")
    assert "hush" not in repr(settings) + repr(options) + str(options)
    assert options.for_nixl(threads=4)["secret_key"] == "hush2"
    assert "access_key" not in BucketOptions(bucket="b").for_nixl(threads=4)
