"""Keys of AWS' own chain: a client keeps what it has found, and other programs renew it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from kvbm_disk_tier.objects.shell import bucket as bucket_module
from kvbm_disk_tier.objects.shell import s3_client
from kvbm_disk_tier.objects.shell.bucket import Bucket
from kvbm_disk_tier.objects.shell.object_store import BucketError, BucketRefused
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions


class Client:
    """A client that deletes, unless it `raises`."""

    def __init__(self, raises: Exception | None = None) -> None:
        self.raises = raises

    def delete_objects(self, **_: object) -> dict[str, Any]:
        """Answer that all is deleted."""
        if self.raises is not None:
            raise self.raises
        return {}


class Clients:
    """The clients that a bucket makes, in order, and its requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coming: list[Client | Exception] = []
        self.made: list[Client] = []
        self.requests: list[bool] = []
        monkeypatch.setattr(bucket_module, "make_client", self._make)
        monkeypatch.setattr(bucket_module, "backoff", lambda: itertools.repeat(0.001))

    def bucket(self, *, access_key: str = "") -> Bucket:
        """Return a bucket with these clients."""
        options = BucketOptions(bucket="b", endpoint="http://127.0.0.1:1", access_key=access_key)
        return Bucket(options, lambda _, ok: self.requests.append(ok))

    def _make(self, *_: object) -> Client:
        client = self.coming.pop(0)
        if isinstance(client, Exception):
            raise client
        self.made.append(client)
        return client


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    """The clients of one test."""
    return Clients(monkeypatch)


def refusal(code: str) -> ClientError:
    """An answer of S3."""
    return ClientError({"Error": {"Code": code}}, "DeleteObjects")


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "AccessDenied"])
async def test_keys_that_were_renewed_before_they_ended_cost_no_call(
    clients: Clients, code: str
) -> None:
    """A session of some hours is not worth the tier's going down at its end."""
    first, second = Client(), Client()
    clients.coming += [first, second]
    bucket = clients.bucket()
    assert await bucket.delete(["x"]) == {}
    first.raises = refusal(code)
    assert await bucket.delete(["x"]) == {}
    assert clients.requests == [True, False, True]
    assert clients.made == [first, second]


async def test_keys_that_have_ended_are_looked_for_once_in_a_call(clients: Clients) -> None:
    """The new client is refused as well: the call fails, and the next one makes another."""
    first = Client()
    clients.coming += [first, *(Client(refusal("ExpiredToken")) for _ in range(2)), Client()]
    bucket = clients.bucket()
    await bucket.delete(["x"])
    first.raises = refusal("ExpiredToken")
    for _ in range(2):
        with pytest.raises(BucketRefused, match="not give access to bucket b"):
            await bucket.delete(["x"])
    assert clients.requests == [True, False, False, False]
    assert await bucket.delete(["x"]) == {}


async def test_keys_of_the_configuration_are_not_looked_for_again(clients: Clients) -> None:
    """No other client would find others."""
    clients.coming += [Client(refusal("AccessDenied")), Client()]
    bucket = clients.bucket(access_key="key")
    for _ in range(2):
        with pytest.raises(BucketRefused, match="DYN_KVBM_OBJECT_ACCESS_KEY"):
            await bucket.delete(["x"])
    assert clients.requests == [False, False]
    assert len(clients.made) == 1


async def test_keys_that_come_late_are_found(
    clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of boto3 that was made without keys has none for good: the next one looks again."""
    file = tmp_path / "credentials"
    for variable in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(bucket_module, "make_client", s3_client.make_client)
    monkeypatch.setattr(bucket_module, "TRIES", 1)
    bucket = clients.bucket()
    with pytest.raises(BucketRefused, match="SECRET_KEY are not set, and there are no other"):
        await bucket.probe("kv/", write=False)
    file.write_text("[default]\naws_access_key_id=key\naws_secret_access_key=secret\n")
    with pytest.raises(BucketError, match="cannot be used: EndpointConnectionError"):
        await bucket.probe("kv/", write=False)


@pytest.mark.parametrize("when", ["made", "used"])
@pytest.mark.parametrize(
    "trouble",
    [
        CredentialRetrievalError(provider="process", error_msg="exit status 1"),
        TokenRetrievalError(provider="sso", error_msg="expired"),
        SSOTokenLoadError(error_msg="no such file"),
        UnauthorizedSSOTokenError(),
        ProfileNotFound(profile="kv"),
        ClientError({"Error": {"Code": "ExpiredTokenException"}}, "AssumeRoleWithWebIdentity"),
    ],
)
async def test_a_source_of_keys_that_fails_is_named_and_asked_again(
    clients: Clients, trouble: BotoCoreError | ClientError, when: str
) -> None:
    """The endpoint has not been asked: its variable is not the one to look at."""
    clients.coming += [trouble if when == "made" else Client(trouble), Client()]
    bucket = clients.bucket()
    assert await bucket.delete(["x"]) == {}
    assert clients.requests == [False, True]
    clients.made[-1].raises = trouble
    clients.coming += [Client(trouble)] * 2
    with pytest.raises(BucketError, match="credentials of AWS' own chain cannot be used: ") as seen:
        await bucket.delete(["x"])
    assert "ENDPOINT" not in str(seen.value)
