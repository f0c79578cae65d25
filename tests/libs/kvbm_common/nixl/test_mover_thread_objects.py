"""The mover and objects: NIXL OBJ against a real S3 server, and against one that says nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from kvbm_common.nixl.mover_thread import MoverThread, TransferFailed, Transferred, TransferTimeout
from kvbm_common.nixl.spans import Spans
from kvbm_common.runtime.processes import free_port
from numpy.typing import NDArray

from tests.services.disk_tier.s3_server import S3Server

SIZE = 10_000
DEADLINE_S = 5.0


def parameters(endpoint: str, bucket: str) -> dict[str, str]:
    """Of NIXL's back end."""
    return {
        "bucket": bucket, "endpoint_override": endpoint, "scheme": "http", "access_key": "key",
        "secret_key": "secret", "region": "us-east-1", "use_virtual_addressing": "false",
        "num_threads": "4",
    }  # fmt: skip


def memory(mover: MoverThread, byte: int) -> NDArray[np.uint8]:
    """Registered memory, all of one byte."""
    array = np.full(SIZE, byte, dtype=np.uint8)
    mover.register_memory(array.ctypes.data, SIZE).result(DEADLINE_S)
    return array


def span(array: NDArray[np.uint8]) -> Spans:
    """All of it."""
    return Spans.of([array.ctypes.data], SIZE)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server for the tests of this module."""
    server = S3Server(free_port(), tmp_path_factory.mktemp("moto") / "log")
    server.start()
    yield server
    server.kill()


@pytest.mark.slow
def test_objects_go_and_come_and_one_that_is_missing_fails_alone(s3: S3Server) -> None:
    """Many at once, each a transfer of its own."""
    where = parameters(s3.endpoint, s3.make_bucket())
    with MoverThread("objects", backends=("OBJ",), object_params=where) as mover:
        source, target, other = (memory(mover, byte) for byte in (7, 0, 0))
        moved = mover.write_object("a/b", span(source), deadline_s=DEADLINE_S).result(DEADLINE_S)
        assert moved.bytes == SIZE
        missing = mover.read_object("a/none", span(other), deadline_s=DEADLINE_S)
        found = mover.read_object("a/b", span(target), deadline_s=DEADLINE_S)
        assert isinstance(found.result(DEADLINE_S), Transferred)
        assert (target == 7).all()
        with pytest.raises(TransferFailed) as failure:
            missing.result(DEADLINE_S)
        assert failure.value.settled
        assert mover.statistics().in_flight == 0


def test_an_object_that_is_shorter_fills_a_part_without_an_error(s3: S3Server) -> None:
    """NIXL says DONE: why its users compare checksums."""
    bucket = s3.make_bucket()
    s3.client.put_object(Bucket=bucket, Key="short", Body=b"\x01" * 10)
    where = parameters(s3.endpoint, bucket)
    with MoverThread("objects", backends=("OBJ",), object_params=where) as mover:
        target = memory(mover, 9)
        mover.read_object("short", span(target), deadline_s=DEADLINE_S).result(DEADLINE_S)
        assert target[:12].tolist() == [1] * 10 + [9] * 2


def test_where_nobody_listens_a_request_ends_at_once() -> None:
    """The AWS SDK would try for 25 seconds."""
    where = parameters(f"http://127.0.0.1:{free_port()}", "bucket")
    with MoverThread("objects", backends=("OBJ",), object_params=where) as mover:
        target = memory(mover, 0)
        started_s = time.monotonic()
        with pytest.raises(TransferFailed):
            mover.read_object("a", span(target), deadline_s=20).result(20)
        assert time.monotonic() - started_s < 5


def test_closing_does_not_wait_for_a_request_that_hangs() -> None:
    """NIXL's agent would end after ten seconds, and stop all of Python meanwhile."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = parameters(f"http://127.0.0.1:{silent.getsockname()[1]}", "bucket")
        mover = MoverThread("objects", backends=("OBJ",), object_params=where)
        target = memory(mover, 0)
        in_flight: Future[Transferred] = mover.write_object("a", span(target), deadline_s=0.2)
        with pytest.raises(TransferTimeout) as failure:
            in_flight.result(DEADLINE_S)
        assert not failure.value.settled
        started_s = time.monotonic()
        mover.close(0.2)
        assert time.monotonic() - started_s < 3
        assert not failure.value.settled, "nobody knows whether it has ended"
