"""The library NIXL as it is installed: its import, errors, and its back ends' parameters."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from kvbm_common.nixl.transfers import BadPeerMetadata, MoverUnavailable
from kvbm_common.runtime.logs import OncePerKind

# Transfers handed to NIXL at a time: past 16 × 1 MiB no path here got faster, and a short queue
# inside NIXL leaves the order to the caller.
IN_FLIGHT_COUNT_MAX = 64
# I/Os in NIXL's POSIX pool, where one too many is an error: 1 GiB of 64 KiB blocks. NIXL's own
# 65,536 costs memory for every agent and was not faster.
POSIX_IO_COUNT_MAX = 16_384
# 16 to 1,024 measured alike (1 MiB and 64 KiB, O_DIRECT); NIXL's default.
POSIX_KERNEL_QUEUE = 256
# A transfer takes one batch of GDS at least, and one too many is an error: as many as may be in
# flight, and as many draining.
GDS_BATCHES = 2 * IN_FLIGHT_COUNT_MAX
NET_DEVICES = "UCX_NET_DEVICES"
_setting_devices = threading.Lock()
_log = OncePerKind(logging.getLogger(__name__))


def _import_nixl() -> tuple[ModuleType, ModuleType]:
    """Import the API and the bindings of the wheel that is installed."""
    # Debian's ibverbs-providers bring a second libnl, and the process then segfaults at exit. An
    # operator with InfiniBand sets UCX_MODULES, and this default does not apply.
    os.environ.setdefault("UCX_MODULES", "^ib")
    # Both libraries print to stdout and stderr, though every failure reaches us as an exception.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raise_exceptions = logging.raiseExceptions
    for package in ("nixl_cu13", "nixl_cu12", "nixl"):  # cu12 is always installed, cu13 on request.
        try:
            api = importlib.import_module(f"{package}._api")
            return api, importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        finally:
            logging.raiseExceptions = raise_exceptions  # NIXL turns it off for the process.
    raise ModuleNotFoundError("no NIXL wheel is installed (nixl-cu12 or nixl-cu13)")


api, bindings = _import_nixl()
NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    value
    for name, value in vars(bindings).items()
    if name.startswith("nixl") and name.endswith("Error")
)


@contextlib.contextmanager
def network_devices(backend: str) -> Iterator[None]:
    """Have UCX listen on loopback only, unless `UCX_NET_DEVICES` says otherwise.

    UCX reads the variable when a back end is made. It is set for so long only: an engine may use
    UCX itself, and reach other machines by it. Threads that make one wait for each other: one
    would take another's value for the operator's, and lose it on the way.
    """
    if backend != "UCX":
        yield
        return
    with _setting_devices:
        if NET_DEVICES in os.environ:
            yield
            return
        os.environ[NET_DEVICES] = "lo"
        try:
            yield
        finally:
            del os.environ[NET_DEVICES]


def add_agent(agent: Any, metadata: bytes) -> str:
    """Have an agent know a peer, and return the peer's name. Raises BadPeerMetadata, and errors of
    NIXL."""
    name: bytes = agent.add_remote_agent(metadata)
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        with contextlib.suppress(*NIXL_ERRORS):
            agent.remove_remote_agent(name)
        raise BadPeerMetadata(f"a peer's name is not valid UTF-8: {error}") from error


def answer_peers(agent: Any) -> bool | None:
    """Let UCX answer peers; return whether one has sent a notification: a peer that adds us does.

    None: that is not known, a notification may be lost. An error is of this call alone, and the
    next poll makes another one.
    """
    try:
        return bool(agent.get_new_notifs(["UCX"]))
    except NIXL_ERRORS as error:
        _log.warning("nixl_poll", f"UCX could not be polled: {error}")
        return None


def defaults_of(backend: str) -> dict[str, str]:
    """Return the default parameters of a back end on this machine."""
    if backend == "GDS":
        return {"batch_pool_size": str(GDS_BATCHES)}
    return posix_defaults() if backend == "POSIX" else {}


def posix_defaults() -> dict[str, str]:
    """Return the parameters of the back end POSIX."""
    return {
        probe_posix(): "true",
        "ios_pool_size": str(POSIX_IO_COUNT_MAX),
        "kernel_queue_size": str(POSIX_KERNEL_QUEUE),
    }


def prepare_object_plugin(agent: Any) -> None:
    """Limit the object plug-in to one request for one transfer.

    The AWS SDK tries 10 times by itself, for 25 s where the port is closed and for a minute where
    no answer comes. Like this it takes 0 s and 3 to 10 s.
    """
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "1")
    agent.get_plugin_params("OBJ")  # Loads the plug-in: else the back end is not found.


@functools.cache
def probe_posix() -> str:
    """Return `use_uring`, or `use_aio` where a container forbids io_uring.

    Never `use_posix_aio`: one request's error fails its innocent neighbours, and it is 5 to 10
    times slower. Raises `MoverUnavailable`.
    """
    for io_queue in ("use_uring", "use_aio"):
        agent = api.nixl_agent(
            "probe", api.nixl_agent_config(enable_prog_thread=False, backends=[])
        )
        with contextlib.suppress(*NIXL_ERRORS):
            agent.create_backend("POSIX", {io_queue: "true", "ios_pool_size": "64"})
            return io_queue
    raise MoverUnavailable("neither io_uring nor Linux AIO is allowed here")


def plugin_names() -> tuple[str, ...]:
    """Return the back ends that NIXL finds."""
    config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
    return tuple(sorted(api.nixl_agent("probe", config).get_plugin_list()))
