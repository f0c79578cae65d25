"""The settings of access: credentials, keys and tokens, and what may be open without them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbm_common.config import schema
from kvbm_common.config.schema import setting

# ruff: noqa: RUF009 - `setting` returns a dataclass field, as dataclasses.field does.

SECTION = "access"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """The settings of the section `access`. A secret is in a file, and a setting names the file."""

    # fmt: off
    creds_dir: Path = setting(
        "KVBM_CREDS_DIR", schema.UNSET_DIR, schema.PATH, section="access",
        default_text="STATE_DIR/creds",
        help="Directory of credentials, one file for each role (`kvbm creds`). `kvbm up` makes "
        "them there.")
    nats_creds_file: Path | None = setting(
        "KVBM_NATS_CREDS_FILE", None, schema.PATH, section="access",
        default_text="CREDS_DIR/ROLE.creds, where it is there",
        help="What this process shows to NATS: a creds file, the seed of an NKey, or "
        "USER:PASSWORD. Read again for each connection.")
    nats_ca_file: Path | None = setting(
        "KVBM_NATS_CA_FILE", None, schema.PATH, section="access",
        help="Certificates of the authorities that may speak for NATS. With it only TLS will do.")
    nats_cert_file: Path | None = setting(
        "KVBM_NATS_CERT_FILE", None, schema.PATH, section="access",
        help="Certificate of this process, where NATS wants one.")
    nats_key_file: Path | None = setting(
        "KVBM_NATS_KEY_FILE", None, schema.PATH, section="access",
        help="Key of that certificate.")
    nats_open: bool = setting(
        "KVBM_NATS_OPEN", False, schema.BOOLEAN, section="access",
        help="NATS may be on another machine without credentials or TLS: on a network that is "
        "KVBM's alone.")
    etcd_ca_file: Path | None = setting(
        "KVBM_ETCD_CA_FILE", None, schema.PATH, section="access",
        help="Certificates of the authorities that may speak for etcd. With it only TLS will do.")
    etcd_cert_file: Path | None = setting(
        "KVBM_ETCD_CERT_FILE", None, schema.PATH, section="access",
        help="Certificate of this process, where etcd wants one.")
    etcd_key_file: Path | None = setting(
        "KVBM_ETCD_KEY_FILE", None, schema.PATH, section="access", help="Key of that certificate.")
    etcd_user: str = setting(
        "KVBM_ETCD_USER", "", schema.TEXT, section="access", help="User of etcd.")
    etcd_password_file: Path | None = setting(
        "KVBM_ETCD_PASSWORD_FILE", None, schema.PATH, section="access",
        help="A file with the password of that user; read again for each connection.")
    etcd_open: bool = setting(
        "KVBM_ETCD_OPEN", False, schema.BOOLEAN, section="access",
        help="etcd may be on another machine without credentials or TLS: on a network that is "
        "KVBM's alone.")
    admin_token_file: Path | None = setting(
        "KVBM_ADMIN_TOKEN_FILE", None, schema.PATH, section="access",
        default_text="CREDS_DIR/admin.token, made by the metrics service where no token is set",
        help="A file with that token; read again when it changes.")
    admin_read_token_file: Path | None = setting(
        "KVBM_ADMIN_READ_TOKEN_FILE", None, schema.PATH, section="access",
        help="A file with that token; read again when it changes.")
    scrape_token_file: Path | None = setting(
        "KVBM_SCRAPE_TOKEN_FILE", None, schema.PATH, section="access",
        help="A file with the bearer token that may read `/metrics`, and the reasons of "
        "`/readyz`, on every service; read again when it changes.")
    metrics_open: bool = setting(
        "KVBM_METRICS_OPEN", False, schema.BOOLEAN, section="access",
        default_text="true on loopback, else false",
        help="`/metrics` and the reasons of `/readyz` need no token on any address.")
    peer_devices: str = setting(
        "KVBM_PEER_DEVICES", "", schema.TEXT, section="access",
        default_text="lo where NATS is on this machine, else `UCX_NET_DEVICES`, else all",
        help="Network devices, as UCX names them, over which host tiers of other hosts read blocks "
        "from here. All else of UCX is on loopback, unless `UCX_NET_DEVICES` is set.")
    curve_server_file: Path | None = setting(
        "KVBM_CURVE_SERVER_FILE", None, schema.PATH, section="access",
        help="Keys (CURVE) of the services' tcp:// sockets, made by `kvbm creds curve`: which "
        "engines and routers may connect.")
    curve_client_file: Path | None = setting(
        "KVBM_CURVE_CLIENT_FILE", None, schema.PATH, section="access",
        help="Keys of an engine or a router that connects to such a socket.")
    engines_open: bool = setting(
        "KVBM_ENGINES_OPEN", False, schema.BOOLEAN, section="access",
        help="Engines may come over tcp:// without keys: on a network that is KVBM's alone.")
    router_open: bool = setting(
        "KVBM_ROUTER_OPEN", False, schema.BOOLEAN, section="access",
        help="Routers may read over tcp:// without keys: on a network that is KVBM's alone.")
    # fmt: on
