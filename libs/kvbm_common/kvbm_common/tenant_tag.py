"""Tenant tags: how the digest of a namespace tells whose it is.

The digest of a namespace with a tenant ends with a mark and the tenant's tag. So a tier knows whose
a block is from its namespace alone: in a journal, in a bucket, and after a restart.
"""

from __future__ import annotations

import hashlib
import re

TENANT_MAX = 64
TENANT = re.compile(rf"[A-Za-z0-9_-]{{1,{TENANT_MAX}}}")
TAG_BYTES = 8
_MARK = b"kvT\x01"


def tag_of(tenant: str) -> bytes:
    """Return the 8 bytes that stand for a tenant in the digests of its namespaces."""
    assert tenant, "a tenant has a name"
    person = b"kvbm-tenant"
    return hashlib.blake2b(tenant.encode(), digest_size=TAG_BYTES, person=person).digest()


def digest_end(tenant: str) -> bytes:
    """Return the 12 bytes that the digests of a tenant's namespaces end with."""
    return _MARK + tag_of(tenant)


def tenant_tag(digest: bytes) -> bytes:
    """Return the tag of the tenant that a namespace's digest tells of; empty: of none."""
    end = digest[-TAG_BYTES - len(_MARK) :]
    return end[len(_MARK) :] if end.startswith(_MARK) else b""
