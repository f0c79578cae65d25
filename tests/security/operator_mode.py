"""A nats-server in operator mode: users are in signed JWTs, as a hosted NATS gives them out."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from kvbm_common.access import nkeys
from kvbm_common.access.secret_files import write_secret


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def jwt_of(claims: dict[str, Any], *, subject: str, name: str, issuer_seed: str) -> str:
    """Return a signed token of NATS's kind."""
    body: dict[str, Any] = {
        "iat": 1_700_000_000, "iss": nkeys.public_of(issuer_seed), "name": name, "sub": subject,
        "nats": claims | {"version": 2},
    }  # fmt: skip
    digest = hashlib.sha512_256 if hasattr(hashlib, "sha512_256") else None
    raw = json.dumps(body).encode()
    hashed = digest(raw).digest() if digest else hashlib.new("sha512_256", raw).digest()
    body["jti"] = base64.b32encode(hashed).decode().rstrip("=")
    header = _text(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    signed = f"{header}.{_text(json.dumps(body).encode())}"
    return f"{signed}.{_text(nkeys.sign(issuer_seed, signed.encode()))}"


def write_operator(creds_file: Path) -> dict[str, Any]:
    """Write the creds file of a user; returns what a server's configuration needs."""
    operator, system, account, user = (nkeys.make_seed(kind) for kind in "OAAU")
    operator_jwt = jwt_of(
        {"type": "operator"}, subject=nkeys.public_of(operator), name="o", issuer_seed=operator
    )
    limits = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1,
              "payload": -1, "wildcards": True, "mem_storage": -1, "disk_storage": -1,
              "streams": -1, "consumer": -1}  # fmt: skip
    claims = {"type": "account", "limits": limits, "default_permissions": {"pub": {}, "sub": {}}}
    account_jwt = jwt_of(claims, subject=nkeys.public_of(account), name="a", issuer_seed=operator)
    without_store = limits | {"mem_storage": 0, "disk_storage": 0, "streams": 0, "consumer": 0}
    system_jwt = jwt_of(
        claims | {"limits": without_store},
        subject=nkeys.public_of(system), name="SYS", issuer_seed=operator,
    )  # fmt: skip
    user_jwt = jwt_of(
        {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1},
        subject=nkeys.public_of(user), name="u", issuer_seed=account,
    )  # fmt: skip
    write_secret(
        creds_file,
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user}\n------END USER NKEY SEED------\n",
    )
    return {
        "operator": operator_jwt,
        "resolver": "MEMORY",
        "system_account": nkeys.public_of(system),
        "resolver_preload": {
            nkeys.public_of(account): account_jwt,
            nkeys.public_of(system): system_jwt,
        },
    }
