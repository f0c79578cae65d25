"""A real S3 server, and a proxy that misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
import httpx
from botocore.config import Config
from kvbm_common.runtime.processes import dying_with_parent
from kvbm_disk_tier.objects.shell.s3_client import BucketOptions

from tests.waiting import wait_for

START_S = 20.0


class S3Server:
    """moto's server in a process of its own."""

    access_key = "key"

    def __init__(self, port: int, log_path: Path) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log, stderr=log, preexec_fn=dying_with_parent(),
                env=os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": "1000"},
            )  # fmt: skip
        wait_for(
            self._answers,
            lambda: f"moto has not started: {self._log_path.read_text()[-2000:]}",
            deadline_s=START_S,
            poll_s=0.05,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            url = f"{self.endpoint}/moto-api/data.json"
            return httpx.get(url, trust_env=False).is_success
        return False

    def kill(self) -> None:
        """End it; its contents go with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @property
    def pid(self) -> int:
        """Its process, to be stopped and continued."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    @cached_property
    def client(self) -> Any:
        """A client of the tests' own."""
        return boto3.session.Session().client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=self.access_key, aws_secret_access_key="secret",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )  # fmt: skip

    def make_bucket(self) -> str:
        """An empty bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def names(self, bucket: str) -> list[str]:
        """Every object."""
        reply = self.client.list_objects_v2(Bucket=bucket)
        return [entry["Key"] for entry in reply.get("Contents", [])]

    def require_keys(self, *, required: bool) -> None:
        """Whether only keys that the server knows (it knows none) are let in."""
        count = "0" if required else "1000000000"
        httpx.post(f"{self.endpoint}/moto-api/reset-auth", content=count, trust_env=False)

    def make_keys(self) -> tuple[str, str]:
        """Make a user who may do all of S3; returns its keys."""
        iam, name = boto3.session.Session().client(
            "iam", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=self.access_key, aws_secret_access_key="secret",
        ), f"user-{uuid.uuid4().hex[:12]}"  # fmt: skip
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=policy)
        keys = iam.create_access_key(UserName=name)["AccessKey"]
        return keys["AccessKeyId"], keys["SecretAccessKey"]

    def options(self, bucket: str, *, endpoint: str = "") -> BucketOptions:
        """How the product is told of it."""
        return BucketOptions(
            bucket=bucket, endpoint=endpoint or self.endpoint, access_key=self.access_key,
            secret_key="secret",
        )  # fmt: skip


class Proxy:
    """Between the product and the server: passes on, swallows, or is slow."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.delay_s = 0.0
        """Before each piece of an answer."""
        self.swallows = False
        """Requests are taken, and never answered."""
        self.refuses = False
        """Connections are closed at once."""
        self.page = b""
        """What every request is answered with, if anything."""
        self.endpoint = ""
        self.waiting_max = 0
        """The most requests at one time that had no answer yet."""
        self._streams: set[asyncio.StreamWriter] = set()
        self._waiting: set[asyncio.StreamWriter] = set()
        """Connections with a request that has no answer yet."""

    async def serve(self) -> asyncio.Server:
        """Listen on a free port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    def drop(self) -> None:
        """Cut every connection."""
        for stream in self._streams:
            stream.transport.abort()

    async def _connected(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        if self.refuses:
            back.transport.abort()
            return
        if self.page:
            await here.read(1 << 16)
            back.write(self.page)
            with contextlib.suppress(ConnectionError):
                await back.drain()
            back.close()
            return
        there, forth = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._streams |= {back, forth}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(here, forth, lambda: self._asks(back), self._swallows))
                tasks.create_task(_copy(there, back, lambda: self._answers(back), self._swallows))
        finally:
            self._waiting.discard(back)
            for stream in (back, forth):
                self._streams.discard(stream)
                stream.transport.abort()

    async def _asks(self, connection: asyncio.StreamWriter) -> None:
        self._waiting.add(connection)
        self.waiting_max = max(self.waiting_max, len(self._waiting))

    async def _answers(self, connection: asyncio.StreamWriter) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self._waiting.discard(connection)

    def _swallows(self) -> bool:
        return self.swallows


async def _copy(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    passes: Callable[[], Awaitable[None]],
    swallows: Callable[[], bool],
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 18):
            await passes()
            if not swallows():
                target.write(data)
                await target.drain()
    target.transport.abort()
