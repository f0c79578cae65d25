"""Hashes of blocks as operators type them: whole, or their first digits, as git takes them."""

from __future__ import annotations

from kvbm_common.errors import ConfigError
from kvbm_common.nats.block_names import DIGITS_MIN, is_beginning, is_whole, only_one

from kvbm_cli.admin_client import Client
from kvbm_cli.asking import Json, asked

SHOWN = 64
"""Characters of a wrong hash that an error repeats."""


def readable(name: str, field: str) -> str:
    """Return a hash, or its first digits, in lower case; raises ConfigError for another text."""
    name = name.lower()
    if not (is_whole(name) or is_beginning(name)):
        accepted = f"32 hex digits, or the first {DIGITS_MIN} or more of a hash"
        raise ConfigError(field, name[:SHOWN], accepted)
    return name


def whole(api: Client, name: str, field: str) -> str:
    """Return the whole hash of the block that is meant; raises ConfigError, NoSuchBlock."""
    name = readable(name, field)
    if is_whole(name):
        return name
    return only_one(name, api.get("/v1/blocks", prefix=name)["hashes"], field)


def with_whole_names(body: Json, url: str) -> Json:
    """Return a request whose hashes of blocks are whole; exits as `asked` does."""
    given = [*(body.get("hashes") or []), *filter(None, [body.get("prefix")])]
    if all(map(is_whole, given)):
        return body

    def ask(api: Client) -> Json:
        made = dict(body)
        if body.get("hashes"):
            made["hashes"] = [whole(api, name, "hashes") for name in body["hashes"]]
        if "prefix" in body:
            made["prefix"] = whole(api, body["prefix"], "--prefix")
        return made

    return asked(ask, url)
