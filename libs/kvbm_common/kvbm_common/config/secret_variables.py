"""Secrets in the environment: which kinds of services get each, and what a child process gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm_common.config.declarations import all_settings

SECRETS: Mapping[str, Sequence[str]] = {
    **{one.variable: one.only_for for one in all_settings() if one.only_for},
    **dict.fromkeys(
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), ("object-tier",)
    ),
}
"""Variables that only these kinds of services get."""


def environ_for(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a kind of process: these without the secrets of others.

    >>> environ_for("engine", {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x"})
    {'HOME': '/root'}
    """
    return {name: text for name, text in environ.items() if kind in SECRETS.get(name, (kind,))}
