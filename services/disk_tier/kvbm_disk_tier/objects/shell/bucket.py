"""The bucket: what NIXL cannot ask of S3 (list, delete, head), and the only import of boto3.

boto3 blocks, so its calls run in a few threads: daemons, because one that hangs must not hold up
the end of the process. Each call has a deadline of ours, and is tried again with growing pauses
where that may help. Errors say which variable to look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from kvbm_common.errors import KvbmError

THREADS = 4
CONNECT_S = 2.0
READ_S = 5.0
"""What boto3 waits for one answer of the network."""
CALL_DEADLINE_S = 10.0
"""What we wait for a call, whatever boto3 does."""
TRIES = 3
PAUSE_S = 0.2
PAUSE_MAX_S = 5.0
PAGE_MAX = 1_000
"""S3's own limit, for lists and for deletes."""

_DENIED = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden")
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "404", "NotFound")
_KEYS = "DYN_KVBM_OBJECT_ACCESS_KEY and DYN_KVBM_OBJECT_SECRET_KEY"

T = TypeVar("T")


class BucketError(KvbmError):
    """A call to the bucket has failed. The text names the variable to look at."""

    code = "bucket"
    retry = True
    """Whether trying again at once may help."""


class BucketRefused(BucketError):
    """The store has answered, and the answer is no: wrong keys, rights or bucket."""

    code = "bucket_refused"
    retry = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """Where the bucket is, from the configuration."""

    bucket: str
    endpoint: str = ""
    """Empty: AWS."""
    region: str = "us-east-1"
    access_key: str = ""
    """Empty: whatever AWS' own chain of credentials finds."""
    secret_key: str = ""
    path_style: bool = True

    def __repr__(self) -> str:
        """Represent the bucket without its keys: the text is logged."""
        return f"{self.bucket} at {self.endpoint or 'AWS'} ({self.region})"

    def for_nixl(self, *, threads: int) -> dict[str, str]:
        """Return the parameters of NIXL's OBJ back end.

        Checksums of the transport are left out: ours is compared after every read, and stores that
        are not AWS differ in them.
        """
        given = {
            "bucket": self.bucket,
            "region": self.region,
            "endpoint_override": self.endpoint,
            "scheme": "http" if self.endpoint.startswith("http://") else "https",
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "use_virtual_addressing": "false" if self.path_style else "true",
            "num_threads": str(threads),
            "req_checksum": "required",
            "resp_checksum": "required",
        }
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing. The store's clock alone tells its age."""

    name: str
    bytes: int
    age_ms: int


class Bucket:
    """One bucket. Its methods belong to one event loop."""

    def __init__(self, options: BucketOptions, counted: Callable[[str, bool], None]) -> None:
        """Prepare a client without a request; `counted(kind, ok)` hears of every later request."""
        self.options = options
        self._counted = counted
        self._turns = asyncio.Semaphore(THREADS)
        self._client: Any = None

    async def pages(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """Yield every object below a prefix, a page at a time; raises BucketError."""
        after: dict[str, str] = {}

        def list_page(client: Any) -> Any:
            return client.list_objects_v2(
                Bucket=self.options.bucket, Prefix=prefix, MaxKeys=PAGE_MAX, **after
            )

        while True:
            reply = await self._call("list", list_page)
            yield _listed(reply)
            if not reply.get("IsTruncated"):
                return
            after = {"ContinuationToken": reply["NextContinuationToken"]}

    async def size(self, name: str) -> int | None:
        """Return the size of an object; None: no such object. Raises BucketError.

        By a list: a head cannot tell a missing object from a missing bucket.
        """
        reply = await self._call("list", lambda client: client.list_objects_v2(
            Bucket=self.options.bucket, Prefix=name, MaxKeys=1
        ))  # fmt: skip
        sizes = {entry.name: entry.bytes for entry in _listed(reply)}
        return sizes.get(name)

    async def delete(self, names: Sequence[str]) -> dict[str, str]:
        """Delete up to a page of objects; returns those that are still there, and why.

        One that was not there is deleted, too. Raises BucketError when nothing is known.
        """
        assert len(names) <= PAGE_MAX
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        reply = await self._call(
            "delete",
            lambda client: client.delete_objects(Bucket=self.options.bucket, Delete=wanted),
        )
        return {error["Key"]: error["Code"] for error in reply.get("Errors", [])}

    async def probe(self, prefix: str, *, write: bool) -> None:
        """Ask for the least: one name of a list and, with `write`, an empty object put."""
        await self._call("list", lambda client: client.list_objects_v2(
            Bucket=self.options.bucket, Prefix=prefix, MaxKeys=1
        ), tries=1)  # fmt: skip
        if write:
            await self._call("put", lambda client: client.put_object(
                Bucket=self.options.bucket, Key=f"{prefix}probe", Body=b""
            ), tries=1)  # fmt: skip

    async def _call(self, kind: str, call: Callable[[Any], T], *, tries: int = TRIES) -> T:
        pauses = backoff()
        for left in reversed(range(tries)):
            try:
                result = await self._try(call)
            except BucketError as error:
                self._counted(kind, False)
                if not error.retry or not left:
                    raise
            else:
                self._counted(kind, True)
                return result
            await asyncio.sleep(next(pauses))
        raise AssertionError("the last try returns or raises")

    async def _try(self, call: Callable[[Any], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(self._run(call))
            except BaseException as error:  # Whatever it is, the caller gets it.
                done.set_exception(error)
            finally:
                with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits.
                    loop.call_soon_threadsafe(self._turns.release)

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                await self._turns.acquire()
                done.set_running_or_notify_cancel()
                threading.Thread(target=run, name="bucket", daemon=True).start()
                return await asyncio.wrap_future(done)
        except TimeoutError as error:
            raise self._away("has not answered") from error

    def _run(self, call: Callable[[Any], T]) -> T:
        """Run a call with the client, in a thread; raises BucketError.

        Two threads may both make the client: one of them is dropped.
        """
        import botocore.exceptions as failures

        try:
            if self._client is None:
                self._client = _make_client(self.options)
            return call(self._client)
        except failures.ClientError as error:
            raise self._refused(_code(error)) from error
        except failures.NoCredentialsError as error:
            text = f"{_KEYS} are not set, and there are no other credentials"
            raise BucketRefused(text) from error
        except (failures.BotoCoreError, failures.HTTPClientError, ValueError) as error:
            raise self._away(f"cannot be used: {type(error).__name__}") from error

    def _refused(self, code: str) -> BucketError:
        if code in _DENIED:
            return BucketRefused(
                f"{_KEYS} do not give access to bucket {self.options.bucket} ({code})"
            )
        if code in _NO_BUCKET:
            return BucketRefused(
                f"DYN_KVBM_OBJECT_BUCKET {self.options.bucket}: there is no such bucket ({code})"
            )
        return self._away(f"answers {code}")

    def _away(self, what: str) -> BucketError:
        where = self.options.endpoint or f"of AWS in {self.options.region}"
        return BucketError(f"DYN_KVBM_OBJECT_ENDPOINT {where} {what}")


def backoff(pause_s: float = PAUSE_S, max_s: float = PAUSE_MAX_S) -> Iterator[float]:
    """Yield pauses in seconds that double up to `max_s`.

    Each is between half and all of its step: many clients do not come at once.
    """
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, max_s)


def _make_client(options: BucketOptions) -> Any:
    from botocore.config import Config

    return _session().client(
        "s3",
        endpoint_url=options.endpoint or None,
        region_name=options.region,
        aws_access_key_id=options.access_key or None,
        aws_secret_access_key=options.secret_key or None,
        config=Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path" if options.path_style else "virtual"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


@functools.cache
def _session() -> Any:
    """Return the boto3 session; it reads megabytes of descriptions, once for a process."""
    import boto3

    return boto3.session.Session()


def _listed(reply: Any) -> list[Listed]:
    headers = reply["ResponseMetadata"]["HTTPHeaders"]
    now = parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
    return [
        Listed(
            entry["Key"],
            int(entry["Size"]),
            max(0, round(1000 * (now - entry["LastModified"].timestamp()))),
        )
        for entry in reply.get("Contents", [])
    ]


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
