"""Users of a nats-server, with the permissions that the table of roles gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_common.access.grants import Grants, grants_of
from kvbm_common.access.nats_credentials import Credentials
from kvbm_common.access.roles import Role
from kvbm_common.errors import ConfigError

ANSWER_WITHIN = "11m"
"""A little longer than the slowest verb may take: a fill has ten minutes."""


def user_of(
    role: Role,
    shown: Credentials,
    *,
    host: str,
    instances: Sequence[str],
    partitions: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Return the entry of one credential in a server's configuration.

    Raises ConfigError for a creds file, whose user is in its JWT and no server's configuration.
    """
    grants = grants_of(role, host=host, instances=instances, partitions=partitions)
    return _identity(shown) | _permissions(role, grants)


def _identity(shown: Credentials) -> dict[str, Any]:
    if shown.jwt:
        raise ConfigError("KVBM_CREDS_DIR", "a creds file", "seeds of NKeys and passwords")
    if shown.seed:
        return {"nkey": shown.public_key}
    return {"user": shown.user, "password": shown.password}


def _permissions(role: Role, grants: Grants) -> dict[str, Any]:
    if grants.everything:
        return {}
    publish = {"allow": list(grants.publish)}
    if grants.publish_never:
        publish["deny"] = list(grants.publish_never)
    permissions: dict[str, Any] = {
        "publish": publish,
        "subscribe": {"allow": list(grants.subscribe)},
    }
    if role.is_service:
        permissions["allow_responses"] = {"max": 1, "expires": ANSWER_WITHIN}
    return {"permissions": permissions}
