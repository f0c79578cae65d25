"""Embedded nats-server of `kvbm up`: its users, with a random password for each role in a file.

The files stay from start to start, so a consumer that was given one keeps its access. A file with
the seed of an NKey is taken as well. What other users could read or write is made again.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbm_common.access.nats_access import SUFFIX
from kvbm_common.access.nats_credentials import BadCredentials, Credentials, parse
from kvbm_common.access.roles import BY_NAME, ROLES, Role, role_of
from kvbm_common.access.secret_files import (
    SecretFile,
    SecretUnreadable,
    is_kept_private,
    make_private_directory,
    write_secret,
)
from kvbm_common.errors import ConfigError

from kvbm_cli.creds.server_users import user_of

PASSWORD_BYTES = 24
DIRECTORY_MODE = 0o700


def authorization_of(
    directory: Path,
    *,
    host: str,
    instances: Sequence[str],
    kinds: Sequence[str] = (),
    partitions: int = 1,
) -> dict[str, Any]:
    """Return the users of a server, after making what is missing of their files.

    Services of other packages, by their kind, get what every service has.

    Raises ConfigError for a directory that cannot be used.
    """
    make_private_directory(directory, "KVBM_CREDS_DIR")
    try:
        directory.chmod(DIRECTORY_MODE)
        users = [
            user_of(
                role,
                _shown_by(role, directory),
                host=host,
                instances=instances,
                partitions=(partitions,),
            )
            for role in (*ROLES, *(role_of(kind) for kind in kinds if kind not in BY_NAME))
        ]
    except OSError as error:
        raise ConfigError("KVBM_CREDS_DIR", directory, f"a directory of yours ({error})") from error
    return {"users": users}


def _shown_by(role: Role, directory: Path) -> Credentials:
    """Return what is in a role's file; a new password where it has no good one."""
    path = directory / f"{role.name}{SUFFIX}"
    with contextlib.suppress(SecretUnreadable, BadCredentials):
        if is_kept_private(path):
            found = parse(SecretFile(path, "KVBM_CREDS_DIR").text())
            if found.seed or found.user == role.name:
                return found
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    write_secret(path, f"{role.name}:{password}\n")
    return Credentials(user=role.name, password=password)
