"""Credentials for NATS: what a creds file, a seed, or a user and password say to a server.

A file holds one of three things, and its text says which:

    a creds file of NATS     a user's JWT and the seed of its key, each between lines of dashes
    the seed of an NKey      one line that begins with SU
    a user and a password    one line, USER:PASSWORD
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field

from kvbm_common.errors import KvbmError

_BLOCK = r"-+BEGIN {name}-+\s+(\S+)\s+-+END {name}-+"
_JWT = re.compile(_BLOCK.format(name="NATS USER JWT"))
_SEED = re.compile(_BLOCK.format(name="USER NKEY SEED"))


class BadCredentials(KvbmError):
    """A text in none of the three forms. The text is not repeated."""

    code = "bad_credentials"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's credentials: a user and password, or a key that signs a challenge."""

    user: str = ""
    password: str = field(default="", repr=False)
    seed: str = field(default="", repr=False)
    jwt: str = field(default="", repr=False)

    @property
    def public_key(self) -> str:
        """The public key of the seed."""
        from kvbm_common.access import nkeys  # A password needs no library.

        return nkeys.public_of(self.seed)

    def sign(self, challenge: str) -> bytes:
        """Return the signature of a server's challenge, as its protocol wants it."""
        from kvbm_common.access import nkeys

        return base64.b64encode(nkeys.sign(self.seed, challenge.encode()))


def parse(text: str) -> Credentials:
    """Read the text of a file; raises BadCredentials."""
    if "NATS USER JWT" in text:
        jwt, seed = _JWT.search(text), _SEED.search(text)
        if jwt is None or seed is None:
            raise BadCredentials("a creds file has a block with a JWT, and one with a seed")
        return Credentials(jwt=jwt[1], seed=seed[1])
    line = text.strip()
    if re.fullmatch(r"SU[A-Z2-7]+", line):
        return Credentials(seed=line)
    user, colon, password = line.partition(":")
    if not (user and colon and password) or re.search(r"\s", line):
        raise BadCredentials("no creds file, no seed (SU…), and no USER:PASSWORD")
    return Credentials(user=user, password=password)
