"""The bucket: what NIXL cannot ask of S3 (list, delete, probe).

boto3 blocks, so its calls run in a few threads: daemons, because one that hangs must not hold up
the end of the process. Each call has a deadline of ours, after which its connection is shut down,
and is tried again with growing pauses where that may help. Errors say which variable to look at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from kvbm_disk_tier.objects.core.answers import (
    FolderList,
    ListAnswer,
    Listed,
    Page,
    age_ms,
    refusal_of,
    store_now_ms,
)
from kvbm_disk_tier.objects.shell.calls import Calls
from kvbm_disk_tier.objects.shell.listing_xml import READ, ReadListing
from kvbm_disk_tier.objects.shell.object_store import (
    PAGE_MAX,
    BucketError,
    BucketRefused,
    backoff,
)
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions, Connections, make_client

CALL_DEADLINE_S = 10.0
"""The seconds that a call may take, whatever boto3 does."""
TRIES = 3
_DENIED = (
    "AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden",
    "ExpiredToken", "InvalidToken", "TokenRefreshRequired",
)  # fmt: skip
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "404", "NotFound")
_KEYS = "DYN_KVBM_OBJECT_ACCESS_KEY and DYN_KVBM_OBJECT_SECRET_KEY"
_FOUND = "the credentials of AWS' own chain"
_CALLED = ("ListObjectsV2", "DeleteObjects", "PutObject")
"""The operations of this module. A failure of another one is that of a source of keys."""
_KEY_FAILURES = (
    "CredentialRetrievalError", "TokenRetrievalError", "SSOError", "LoginError", "NoAuthTokenError",
    "PartialCredentialsError", "ProfileNotFound", "UnknownCredentialError",
)  # fmt: skip
"""The names of botocore's errors about keys; an older botocore has fewer."""

T = TypeVar("T")


class _KeysRefused(BucketRefused):
    """The refusal of a client that has found its keys before: they may have been renewed since."""


class Bucket:
    """One bucket. Its methods belong to one event loop."""

    def __init__(self, options: BucketOptions, counted: Callable[[str, bool], None]) -> None:
        """Prepare a client without a request; `counted(kind, ok)` hears of every later request."""
        self.where = f"bucket {options!r}"
        self.check_s: float | None = None  # Its owner pays for each request.
        self.options = options
        self._counted = counted
        self._connections = Connections()
        self._calls = Calls(self._connections.interrupt)
        self._client: Any = None

    async def folders(self, prefix: str) -> FolderList:
        """Return the prefixes that go on to the next `/` below this one; raises BucketError."""
        found: list[str] = []
        after, more = "", True
        while more:
            listing = await self._list(_as_read, prefix, after, Delimiter="/")
            found += listing.folders
            more, last = bool(listing.is_truncated), max([*listing.folders, *listing.names, ""])
            if more and last <= after:
                raise self._away("answers a listing of folders that does not go on")
            after = last
        return FolderList(found)

    async def page(self, prefix: str, after: str) -> Page:
        """Return a page of the names with this prefix, behind one; raises BucketError."""
        return await self._list(_page, prefix, after)

    async def size(self, name: str) -> int | None:
        """Return the size of an object; None: no such object. Raises BucketError.

        By a list: a head cannot tell a missing object from a missing bucket.
        """
        page = await self._list(_page, name, "", MaxKeys=1)
        return next((one.bytes for one in page.objects if one.name == name), None)

    async def delete(self, names: Sequence[str]) -> dict[str, str]:
        """Delete up to a page of objects; returns those that are still there, and why.

        One that was not there is deleted, too. Raises BucketError when nothing is known.
        """
        assert len(names) <= PAGE_MAX
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}

        def delete(client: Any) -> dict[str, str]:
            reply = client.delete_objects(Bucket=self.options.bucket, Delete=wanted)
            return {
                str(error.get("Key", "")): str(error.get("Code", "unknown"))
                for error in reply.get("Errors", [])
            }

        return await self._call("delete", delete)

    async def probe(self, prefix: str, *, write: bool) -> None:
        """Ask for the least: one name of a list and, with `write`, an empty object put."""
        await self._list(_page, prefix, "", tries=1, MaxKeys=1)
        if write:
            await self._call("put", lambda client: client.put_object(
                Bucket=self.options.bucket, Key=f"{prefix}probe", Body=b""
            ), tries=1)  # fmt: skip

    async def _list(
        self,
        use: Callable[[ReadListing, int], T],
        prefix: str,
        after: str,
        *,
        tries: int = TRIES,
        **more: Any,
    ) -> T:
        """Read the answer to a list, once it is one; by names, so that no token is needed."""
        wanted: dict[str, Any] = {"MaxKeys": PAGE_MAX} | more
        if after:
            wanted["StartAfter"] = after

        def list_page(client: Any) -> T:
            reply = client.list_objects_v2(Bucket=self.options.bucket, Prefix=prefix, **wanted)
            listing: ReadListing = reply.get(READ, ReadListing())
            answer = ListAnswer(
                is_listing=listing.is_truncated is not None,
                prefix=listing.prefix,
                is_truncated=bool(listing.is_truncated) and "Delimiter" not in wanted,
                names=listing.names,
            )
            refusal = refusal_of(answer, prefix=prefix, after=after)
            if refusal:
                raise self._away(f"answers {refusal}")
            return use(listing, _store_now_ms(reply))

        return await self._call("list", list_page, tries=tries)

    # --- calls ------------------------------------------------------------------------------

    async def _call(self, kind: str, call: Callable[[Any], T], *, tries: int = TRIES) -> T:
        """Try a call until it succeeds; once more at once where new keys may be found."""
        pauses, may_renew = backoff(), True
        left = tries
        while True:
            try:
                result = await self._try(call)
            except BucketError as error:
                self._counted(kind, False)
                if may_renew and isinstance(error, _KeysRefused):
                    may_renew = False
                    continue
                left -= 1
                if not error.retry or not left:
                    raise
            else:
                self._counted(kind, True)
                return result
            await asyncio.sleep(next(pauses))

    async def _try(self, call: Callable[[Any], T]) -> T:
        try:
            return await self._calls.run(lambda: self._run(call), deadline_s=CALL_DEADLINE_S)
        except TimeoutError as error:
            raise self._away(f"has not answered within {CALL_DEADLINE_S:g} s") from error
        except OSError as error:  # There is no thread for it.
            raise self._away(f"cannot be asked: {error}") from error

    def _run(self, call: Callable[[Any], T]) -> T:
        """Run a call with the client, in a thread; raises BucketError.

        Two threads may both make the client: one of them is dropped.
        """
        import botocore.exceptions as failures

        client = known = self._client
        try:
            if client is None:
                client = self._client = make_client(self.options, self._connections)
            return call(client)
        except BucketError:
            raise
        except failures.ClientError as error:
            if error.operation_name not in _CALLED:
                raise self._keyless(client, _code(error)) from error
            raise self._refused(_code(error), client, is_new=known is None) from error
        except failures.NoCredentialsError as error:
            self._drop(client)
            text = f"{_KEYS} are not set, and there are no other credentials"
            raise BucketRefused(text) from error
        except (failures.BotoCoreError, failures.HTTPClientError, OSError) as error:
            if any(kind.__name__ in _KEY_FAILURES for kind in type(error).__mro__):
                raise self._keyless(client, type(error).__name__) from error
            raise self._away(f"cannot be used: {type(error).__name__}") from error
        except Exception as error:  # botocore fails in many ways at what is no answer of S3.
            raise self._away(f"answers what makes no sense: {error!r:.200}") from error
        finally:
            self._connections.forget()

    def _refused(self, code: str, client: Any, *, is_new: bool) -> BucketError:
        if code in _DENIED:
            text = f"do not give access to bucket {self.options.bucket} ({code})"
            if self.options.access_key:
                return BucketRefused(f"{_KEYS} {text}")
            self._drop(client)
            return (BucketRefused if is_new else _KeysRefused)(f"{_FOUND} {text}")
        if code in _NO_BUCKET:
            return BucketRefused(
                f"DYN_KVBM_OBJECT_BUCKET {self.options.bucket}: there is no such bucket ({code})"
            )
        return self._away(f"answers {code}")

    def _keyless(self, client: Any, what: str) -> BucketError:
        """Return the error of a call that could not be signed; the source may answer again."""
        self._drop(client)
        return BucketError(f"{_KEYS if self.options.access_key else _FOUND} cannot be used: {what}")

    def _drop(self, client: Any) -> None:
        """Have a new client made, which looks for keys again: one keeps what it has found."""
        if self._client is client:  # Otherwise another thread has made one since.
            self._client = None

    def _away(self, what: str) -> BucketError:
        where = self.options.endpoint or f"of AWS in {self.options.region}"
        return BucketError(f"DYN_KVBM_OBJECT_ENDPOINT {where} {what}")


def _page(listing: ReadListing, now_ms: int) -> Page:
    entries = zip(listing.names, listing.sizes, listing.stored_ms, strict=True)
    objects = [Listed(name, size, age_ms(stored_ms, now_ms)) for name, size, stored_ms in entries]
    return Page(objects, bool(listing.is_truncated), objects[-1].name if objects else "")


def _as_read(listing: ReadListing, _now_ms: int) -> ReadListing:
    return listing


def _store_now_ms(reply: Any) -> int:
    own_ms = round(1000 * time.time())
    try:
        date = reply["ResponseMetadata"]["HTTPHeaders"]["date"]
        return store_now_ms(round(1000 * parsedate_to_datetime(date).timestamp()), own_ms)
    except (KeyError, TypeError, ValueError, OverflowError):
        return own_ms


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
