"""What a file with credentials may say, and that an error never repeats it."""

from __future__ import annotations

import pytest
from kvbm_common.access.nats_credentials import BadCredentials, Credentials, parse

from tests.libs.kvbm_common.access.test_nkeys import PUBLIC, SEED

CREDS = f"""-----BEGIN NATS USER JWT-----
a.jwt.text
------END NATS USER JWT------

************************* IMPORTANT *************************
NKEY Seed printed below can be used to sign and prove identity.

-----BEGIN USER NKEY SEED-----
{SEED}
------END USER NKEY SEED------
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:b\n", Credentials(user="a", password="b")),
        ("a:b:c", Credentials(user="a", password="b:c")),
        (f"{SEED}\n", Credentials(seed=SEED)),
        (CREDS, Credentials(seed=SEED, jwt="a.jwt.text")),
    ],
    ids=["password", "password with a colon", "seed", "creds file"],
)
def test_three_forms(text: str, expected: Credentials) -> None:
    """The text says which it is."""
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["secret", "secret:", ":secret", "a secret:b", CREDS.split("NKEY SEED")[0], "SUsecret"]
)
def test_other_texts_are_refused(text: str) -> None:
    """No error and no repr has a secret in it."""
    with pytest.raises(BadCredentials) as caught:
        parse(text)
    assert "secret" not in str(caught.value)


def test_a_repr_has_no_secret() -> None:
    """A log line or an assertion may print it."""
    for text in ("user:secret", SEED, CREDS):
        shown = repr(parse(text))
        assert "secret" not in shown
        assert SEED not in shown
        assert "jwt.text" not in shown


def test_a_seed_signs() -> None:
    """The public key goes to the server; the signature is base64, as its protocol has it."""
    found = parse(SEED)
    assert found.public_key == PUBLIC
    assert len(found.sign("challenge")) == 88
