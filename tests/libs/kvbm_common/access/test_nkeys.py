"""NKeys: the vector was made with the library `nkeys`, which NATS publishes for Python."""

from __future__ import annotations

import base64

import pytest
from kvbm_common.access import nkeys
from kvbm_common.access.nkeys import BadKey

SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"
PUBLIC = "UAB2CB576PHBBPQ5ODORRZ2LYCMWPZGWGCN2KDK7DXOIMZASKUY3RLKK"
SIGNATURE = (
    "KtXN79qJ2ax91ew3P6LQ5YzRf0XftpNSGS2se3NUcdvnwTsxibCQbDqDgt5iurXUWc7Is6FOyun4f1PAMqCSAQ=="
)


def test_a_known_seed() -> None:
    """Its public key and a signature are those that NATS's own library gives."""
    assert nkeys.public_of(SEED) == PUBLIC
    assert base64.b64encode(nkeys.sign(SEED, b"challenge")).decode() == SIGNATURE


@pytest.mark.parametrize("kind", ["U", "A", "O"])
def test_seeds_are_made_for_each_kind(kind: str) -> None:
    """The first letter of the public key, and the second of the seed, say what it is for."""
    seed = nkeys.make_seed(kind)
    assert seed[:2] == f"S{kind}"
    assert nkeys.public_of(seed)[0] == kind
    assert nkeys.make_seed(kind) != seed


@pytest.mark.parametrize(
    "text", ["", "SU", SEED[:-1], SEED[:-1] + "A", PUBLIC, "SU not base32", "x" * 58]
)
def test_a_wrong_seed_is_refused(text: str) -> None:
    """And not repeated in the error."""
    with pytest.raises(BadKey) as caught:
        nkeys.public_of(text)
    assert not text or text not in str(caught.value)
