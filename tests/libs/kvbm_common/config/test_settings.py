"""The configuration: sources and their order, parsing, errors and warnings."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.tier.departures import departures_for


def load(**environ: str) -> Settings:
    return Settings.load(environ)


def test_defaults_are_those_of_kvbm() -> None:
    """Goal: the documented defaults, and sockets in the runtime directory."""
    settings = load()
    assert settings.cpu_cache_gb == 0
    assert settings.max_concurrent_transfers == 4
    assert settings.max_transfer_batch_size == 16
    assert settings.leader_worker_init_timeout_s == 1800
    assert settings.metrics_port == 6880
    assert settings.runtime_dir == Path(f"/tmp/kvbm-{os.getuid()}")
    assert settings.host_tier_endpoint == f"ipc:///tmp/kvbm-{os.getuid()}/host-tier.sock"
    assert settings.warnings == ()


def test_order_of_sources(tmp_path: Path) -> None:
    """Goal: command line, environment, file, default; and each value knows where it is from."""
    file = tmp_path / "kvbm.toml"
    file.write_text(
        "[host_tier]\ncpu_cache_gb = 1\nstaging_gb = 0.5\n[transfers]\nlease_ms = 1000\n"
    )
    environ = {
        "KVBM_CONFIG_FILE": str(file),
        "DYN_KVBM_CPU_CACHE_GB": "2.5",
        "KVBM_LEASE_MS": "2000",
    }
    settings = Settings.load(environ, {"lease_ms": 3000})
    assert (settings.staging_gb, settings.cpu_cache_gb, settings.lease_ms) == (0.5, 2.5, 3000)
    assert settings.provenance("lease_ms") == "command line"
    assert settings.provenance("cpu_cache_gb") == "environment DYN_KVBM_CPU_CACHE_GB"
    assert settings.provenance("staging_gb") == f"file {file}"
    assert settings.provenance("nats_url") == "default"


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "On"])
def test_1_true_yes_and_on_are_true_in_any_case(text: str) -> None:
    assert load(DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=text).disable_disk_offload_filter


@pytest.mark.parametrize("text", ["0", "false", "False", "no", "OFF"])
def test_0_false_no_and_off_are_false_in_any_case(text: str) -> None:
    assert not load(DYN_KVBM_METRICS=text).metrics
    assert not load(DYN_KVBM_DISK_ZEROFILL_FALLBACK=text).disk_zerofill_fallback


def test_empty_variable_is_unset() -> None:
    """Goal: what compose files make of a variable that is not set."""
    settings = load(DYN_KVBM_METRICS_PORT="", DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="")
    assert settings.metrics_port == 6880
    assert settings.cpu_cache_override_num_blocks is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DYN_KVBM_CPU_CACHE_GB", "-1"),
        ("DYN_KVBM_CPU_CACHE_GB", "nan"),
        ("DYN_KVBM_CPU_CACHE_GB", "4GB"),
        ("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "0"),
        ("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "2.5"),
        ("DYN_KVBM_METRICS_PORT", "70000"),
        ("DYN_KVBM_METRICS", "maybe"),
        ("DYN_KVBM_DISK_CACHE_DIR", "relative/path"),
        ("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "both"),
        ("KVBM_NATS_URL", "127.0.0.1:4222"),
        ("KVBM_HOST", "host.with.dots"),
        ("KVBM_HOST_TIER_ENDPOINT", "/tmp/socket"),
        ("KVBM_HISTORY_ENTRIES", "0"),
        ("KVBM_HISTORY_ENTRIES", "1000001"),
        ("KVBM_HISTORY_ENTRIES", "all"),
    ],
)
def test_bad_value_names_variable_value_and_what_is_accepted(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{variable: value})
    assert caught.value.field == variable
    for part in (variable, value, caught.value.accepted):
        assert part in str(caught.value)


def test_histories_that_explain_misses_can_keep_what_is_accepted() -> None:
    """Nothing is chosen by default; the most that is accepted fits."""
    assert load().history_entries is None
    most = load(KVBM_HISTORY_ENTRIES="1000000").history_entries
    assert most is not None
    assert departures_for(1, most) == most == 1_000_000
    with pytest.raises(ConfigError, match=r"KVBM_HISTORY_ENTRIES.*from 1 to 1000000"):
        load(KVBM_HISTORY_ENTRIES="0")


def test_bad_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvbm.toml"
    file.write_text("[transfers]\nlease_ms = 'long'\n")
    with pytest.raises(ConfigError, match=r"transfers\.lease_ms in file .*kvbm\.toml"):
        load(KVBM_CONFIG_FILE=str(file))


@pytest.mark.parametrize("text", ["[transfers", None])
def test_unreadable_file(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "kvbm.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="KVBM_CONFIG_FILE"):
        load(KVBM_CONFIG_FILE=str(file))


def test_unknown_names_are_warned_about(tmp_path: Path) -> None:
    """Goal: a typing mistake is seen; KVBM's names without effect are told apart."""
    file = tmp_path / "kvbm.toml"
    file.write_text("surprise = 1\n[transfers]\nleas_ms = 1\n")
    settings = load(
        KVBM_CONFIG_FILE=str(file),
        DYN_KVBM_CPU_CACH_GB="1",
        KVBM_WHATEVER="1",
        DYN_KVBM_NIXL_BACKEND_UCX="true",
        PATH="/bin",
    )
    text = "\n".join(settings.warnings)
    assert "DYN_KVBM_CPU_CACH_GB is not a setting; did you mean DYN_KVBM_CPU_CACHE_GB?" in text
    assert "KVBM_WHATEVER is not a setting" in text
    assert "DYN_KVBM_NIXL_BACKEND_UCX has no effect here" in text
    assert "transfers.leas_ms is not a setting; did you mean transfers.lease_ms?" in text
    assert "surprise is not a setting" in text
    assert len(settings.warnings) == 5


def test_child_process_gets_the_same_settings() -> None:
    """Goal: `as_environ` carries everything that is not a default."""
    settings = Settings.load(
        {"DYN_KVBM_METRICS": "no"}, {"cpu_cache_gb": 0.125, "runtime_dir": Path("/tmp/x")}
    )
    child = Settings.load(settings.as_environ())
    assert child == settings


@pytest.mark.parametrize(
    ("url", "endpoints", "servers"),
    [
        ("", "", ()),
        ("nats", "https://not.read", ()),
        ("etcd", "", ("localhost:2379",)),
        ("etcd", "http://a:1,http://b:2", ("a:1", "b:2")),
        ("etcd://a:1,b", "http://c:3", ("a:1", "b:2379")),
        ("etcd://[::1]:7", "", ("[::1]:7",)),
    ],
)
def test_registry_is_nats_or_etcd(url: str, endpoints: str, servers: tuple[str, ...]) -> None:
    """Goal: our variable decides; Dynamo's says where etcd is when ours does not."""
    assert load(KVBM_REGISTRY_URL=url, ETCD_ENDPOINTS=endpoints).etcd_servers == servers


@pytest.mark.parametrize("url", ["etcd://", "etcd://a:x", "http://a:1", "zookeeper"])
def test_registry_must_be_known(url: str) -> None:
    with pytest.raises(ConfigError, match="KVBM_REGISTRY_URL"):
        load(KVBM_REGISTRY_URL=url)


def test_etcd_endpoints_are_checked_when_they_are_read() -> None:
    """Goal: a variable of somebody else's ends nothing of ours, unless we were told to use it."""
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        load(KVBM_REGISTRY_URL="etcd", ETCD_ENDPOINTS="ftp://a:1")


def test_disk_store_is_in_the_state_directory() -> None:
    """Unless it is set: a directory to which all write invites others to be first."""
    settings = load(KVBM_STATE_DIR="/state")
    assert settings.disk_cache_dirs == (Path("/state/disk"),)
    settings = load(DYN_KVBM_DISK_CACHE_DIR="/tmp")
    assert settings.disk_cache_dirs == (Path("/tmp"),)


@pytest.mark.parametrize("name", ["HOME", "XDG_STATE_HOME"])
@pytest.mark.parametrize("text", ["", "relative"])
def test_state_goes_to_the_home_of_the_user(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: `HOME=` of a service file puts no credentials into `/`, or where it happens to run."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(name, text)
    assert load().state_dir == home / ".local/state/kvbm"


def test_a_user_without_a_home_must_say_where_state_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a number that no user has."""
    numbers = {user.pw_uid for user in pwd.getpwall()}
    monkeypatch.setattr(os, "getuid", lambda: max(numbers) + 1)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(ConfigError, match=r"KVBM_STATE_DIR.*default needs a HOME"):
        load()
    assert load(KVBM_STATE_DIR="/state").state_dir == Path("/state")


def test_a_home_of_no_user_is_no_path() -> None:
    with pytest.raises(ConfigError, match="KVBM_STATE_DIR is '~no-such-user/x'"):
        load(KVBM_STATE_DIR="~no-such-user/x")
