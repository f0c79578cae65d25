"""Credentials of a compose project: made once, and shared out to one volume for each service.

    HOME/                        what `kvbm nats-config` writes; no service mounts it
    HOME/sets/HOST/ROLE/         what a container of that role on that host needs
    HOME/sets/shared/ROLE/       the same for roles of all hosts; nats, etcd, scrape and streams
    VOLUMES/ROLE/                a volume each: the sets of this host, and the shared ones

A container mounts its own volume, read-only, and no other. Its user may not be the one that runs
this: the group may read. A run makes what is missing and leaves what is there. A host whose sets
were made on another one imports them, and makes none.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from kvbm_common.access.addresses import is_loopback
from kvbm_common.access.http_access import ADMIN_TOKEN, TOKEN_BYTES
from kvbm_common.access.nats_access import SUFFIX
from kvbm_common.access.roles import ADMIN, CONSUMER, ROLES, Role
from kvbm_common.access.secret_files import OWNER_ONLY, SECRET_BYTES_MAX, write_secret
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError

from kvbm_cli.creds.certificates import Authority
from kvbm_cli.creds.commands import plan_of, stream_room, write_all
from kvbm_cli.creds.nats_config import CONFIGURATION, SHARED, CredentialPlan, names_of, read_plan
from kvbm_cli.creds.tls_files import AUTHORITY, ETCD

HOME = Path("/var/lib/kvbm-creds")
VOLUMES = Path("/creds")
MOUNTED_AT = "/etc/kvbm/creds"
"""The path at which a container finds its own volume."""
SETS = "sets"
IMPORTED = "imported"
NATS = "nats"
SCRAPE = "scrape"
STREAMS = "streams"
"""The service that makes the streams: as the role admin on NATS, and nowhere else."""
SCRAPE_TOKEN = "scrape.token"
VOLUME_MODE = 0o640
SCRAPE_MODE = 0o644
"""Prometheus has a user and group of its own, and nothing else mounts that volume."""
TENANT = "kvbm"
LOCAL_NAMES = ("localhost", "127.0.0.1")
SERVER_FILES = ("ca.pem", "server.pem", "server.key")
ARCHIVE_BYTES_MAX = 1024 * 1024
"""The sets of one host are some ten KiB."""
NAME = re.compile(r"[a-z][a-z-]*\.[a-z]+")
"""The name of a file of a set."""
OPTIONS = ("--rotate", "--drop-old", "--import")


def plan_from(environ: Mapping[str, str], home: Path) -> CredentialPlan:
    """Return the plan that the variables of the compose file describe; raises ConfigError."""
    host = environ.get("KVBM_HOST", "")
    bind = environ.get("KVBM_BIND", "")
    names = [*names_of(environ.get("KVBM_CREDS_NAMES", "")), *LOCAL_NAMES]
    if bind and bind not in ("0.0.0.0", "::") and not is_loopback(bind):
        names.insert(0, bind)
    given = {
        "hosts": names_of(",".join((host, environ.get("KVBM_CREDS_HOSTS", "")))),
        "names": tuple(dict.fromkeys((NATS, *names))),
        "etcd_names": tuple(dict.fromkeys((ETCD, *names))),
        "server_dir": MOUNTED_AT,
    }
    return plan_of(home, given | stream_room(Settings.load(environ)))


def fill(
    home: Path, volumes: Path, plan: CredentialPlan, *, rotate: bool = False, drop_old: bool = False
) -> None:
    """Write credentials, the set of each role, and the volumes that are mounted.

    Of a token there is one at a time: a rotation ends the old one at once.

    Raises ConfigError, OSError.
    """
    _drop_certificates_of_other_names(home, plan)
    write_all(home, plan, rotate=rotate, drop_old=drop_old)
    for name in (ADMIN_TOKEN, SCRAPE_TOKEN):
        if rotate or not (home / name).exists():
            write_secret(home / name, secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    authority = Authority(home / AUTHORITY)
    for role in ROLES:
        for host in plan.hosts if role.per_host else (SHARED,):
            _write_set(home, role, host, authority)
    shared = home / SETS / SHARED
    _copy(home / "server", shared / NATS, (CONFIGURATION, *SERVER_FILES))
    _copy(home / ETCD, shared / ETCD, SERVER_FILES)
    _copy(home, shared / SCRAPE, (SCRAPE_TOKEN,))
    _copy(home / TENANT / SHARED, shared / STREAMS, (f"{ADMIN}{SUFFIX}", "ca.pem"))
    for folder in (home / SETS / plan.hosts[0], shared):
        for found in sorted(folder.iterdir()):
            if (volumes / found.name).is_dir():
                mode = SCRAPE_MODE if found.name == SCRAPE else VOLUME_MODE
                _copy(found, volumes / found.name, os.listdir(found), mode=mode)


def import_sets(archive: bytes, home: Path, volumes: Path) -> list[str]:
    """Write the files ROLE/NAME of a tar archive to the volumes; returns the roles.

    Raises ConfigError for an archive without any, and for one with the sets of several hosts.
    """
    texts: dict[tuple[str, str], str] = {}
    for role, name, text in _members(archive):
        if texts.setdefault((role, name), text) != text:
            accepted = f"the sets of one host: {role}/{name} is there twice, and differs"
            raise ConfigError("--import", "standard input", accepted)
    mounted = {file: text for file, text in texts.items() if (volumes / file[0]).is_dir()}
    if not mounted:
        accepted = "a tar archive of a host's sets, as `docker cp` writes it"
        raise ConfigError("--import", "standard input", accepted)
    for (role, name), text in mounted.items():
        write_secret(volumes / role / name, text, mode=VOLUME_MODE)
    roles = sorted({role for role, _ in mounted})
    write_secret(home / IMPORTED, "\n".join(roles) + "\n")
    return roles


def run(
    arguments: Sequence[str], environ: Mapping[str, str], archive: BinaryIO,
    *, home: Path = HOME, volumes: Path = VOLUMES,
) -> str:  # fmt: skip
    """Do what the arguments of the container say; returns what to print. Raises ConfigError."""
    unknown = [one for one in arguments if one not in OPTIONS]
    if unknown or len(arguments) > 1:
        raise ConfigError("kvbm creds of compose", " ".join(arguments), f"one of {OPTIONS}")
    try:
        if "--import" in arguments:
            roles = import_sets(archive.read(ARCHIVE_BYTES_MAX), home, volumes)
            return f"imported: {', '.join(roles)}"
        if (home / IMPORTED).exists():
            return "the credentials of this host were made on another one, and imported"
        plan = plan_from(environ, home)
        fill(
            home, volumes, plan,
            rotate="--rotate" in arguments, drop_old="--drop-old" in arguments,
        )  # fmt: skip
    except OSError as error:
        accepted = f"volumes that user {os.geteuid()} may write to ({error})"
        raise ConfigError("the volumes of credentials", home, accepted) from error
    return f"credentials are there for {', '.join(plan.hosts)}"


def _drop_certificates_of_other_names(home: Path, plan: CredentialPlan) -> None:
    """Remove a server's certificate whose names are no longer those of the plan."""
    before = read_plan(home)
    if before is None:
        return
    for folder, old, new in (
        ("server", before.names, plan.names), (ETCD, before.etcd_names, plan.etcd_names),
    ):  # fmt: skip
        if old != new:
            (home / folder / "server.pem").unlink(missing_ok=True)


def _write_set(home: Path, role: Role, host: str, authority: Authority) -> None:
    target = home / SETS / host / role.name
    _copy(home / TENANT / host, target, (f"{role.name}{SUFFIX}", "ca.pem"))
    if role.name != CONSUMER:
        authority.give(target, ETCD, f"{TENANT}.{host}.{role.name}")
        _copy(home, target, (SCRAPE_TOKEN,))
    if role.name in ("metrics", ADMIN):
        _copy(home, target, (ADMIN_TOKEN,))


def _copy(source: Path, target: Path, names: Sequence[str], *, mode: int = OWNER_ONLY) -> None:
    """Copy files that differ; the directory keeps the mode that it has."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in names:
        text = (source / name).read_text()
        if not (target / name).exists() or (target / name).read_text() != text:
            write_secret(target / name, text, mode=mode)


def _members(archive: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield role, name and text of each file of an archive; raises ConfigError."""
    roles = {role.name for role in ROLES}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            for member in opened:
                *_, role, name = ("", *Path(member.name).parts)
                file = opened.extractfile(member) if member.isfile() else None
                is_ours = role in roles and NAME.fullmatch(name) is not None
                if file is not None and is_ours and member.size <= SECRET_BYTES_MAX:
                    yield role, name, file.read().decode("ascii")
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise ConfigError("--import", "standard input", f"a tar archive ({error})") from error
