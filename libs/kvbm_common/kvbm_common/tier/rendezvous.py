"""Rendezvous hashing: each name gives each key a weight, and the heaviest has the key.

When a name comes or goes, only the keys that it wins or had change hands.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm_common.checksum import block_checksum


def owner_of(key: bytes, names: Mapping[str, bytes]) -> str | None:
    """Return the name that owns a key, of names and their bytes; None: there are none."""
    assert key, "a key has bytes"
    if not names:
        return None
    return max(names, key=lambda name: block_checksum(key + names[name]))
