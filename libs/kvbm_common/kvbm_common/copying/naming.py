"""Naming by the compiled library: token ids out of msgpack, and the names of a chain in one call.

Python makes an object of each token id, and five calls for each name. Without the library, or with
one of older sources, `best_naming` returns what does the same in Python.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbm_common.copying import LIBRARY
from kvbm_common.identity import (
    HASH_BYTES,
    TOKEN_BYTES,
    Extras,
    Hasher,
    SequenceHash,
    check_hash,
    pack_tokens,
    unpack_hashes,
)
from kvbm_common.wire.compact_batches import ReadTokens

BLOCKS_MIN = 4
"""Blocks from which on a call of the library takes less time than Python does."""
TOKENS_MAX = 65_536
"""Token ids of one event that the library reads; events with more are read by Python."""

log = logging.getLogger(__name__)


class Naming(NamedTuple):
    """The two functions, both compiled or both in Python."""

    hasher: type[Hasher]
    read_tokens: ReadTokens | None


def native_naming(path: Path = LIBRARY) -> Naming:
    """Return the functions of the library at this path.

    Raises OSError where it is missing or of another platform, AttributeError where it was compiled
    from older sources.
    """
    # A PyDLL keeps the interpreter's lock: to get it back would cost more than the work itself.
    library = ctypes.PyDLL(str(path))
    name_blocks, read_ids = library.kvbm_chain, library.kvbm_token_ids
    raw, size, place = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
    name_blocks.argtypes, name_blocks.restype = (raw, raw, raw, size, size, place), None
    read_ids.argtypes, read_ids.restype = (raw, size, place, size), ctypes.c_ssize_t

    class NativeHasher(Hasher):
        """Names of one namespace, made by the compiled library."""

        def chain(
            self,
            tokens: Sequence[int] | np.ndarray,
            *,
            parent: SequenceHash | None = None,
            extras: Mapping[int, Extras] | None = None,
        ) -> list[SequenceHash]:
            """Return what `Hasher.chain` returns; blocks up to the last extra are named by it."""
            packed, size = pack_tokens(tokens), self.block_bytes
            count = len(packed) // size
            apart = min(count, 1 + max(extras)) if extras else 0
            if count - apart < BLOCKS_MIN:
                return super().chain(_ids(packed), parent=parent, extras=extras)
            first: list[SequenceHash] = []
            if apart:
                first = super().chain(_ids(packed[: apart * size]), parent=parent, extras=extras)
            given = self.root if parent is None else bytes(check_hash(parent))
            before = first[-1] if first else given
            names = ctypes.create_string_buffer((count - apart) * HASH_BYTES)
            rest = packed[apart * size :]
            name_blocks(self.namespace.digest, before, rest, size, count - apart, names)
            return first + unpack_hashes(names.raw)

    room = _Room()

    def read_tokens(array: bytes) -> bytes | None:
        count = read_ids(array, len(array), room.ids, TOKENS_MAX)
        return None if count < 0 else room.found[: count * TOKEN_BYTES].tobytes()

    return Naming(NativeHasher, read_tokens)


class _Room(threading.local):
    """Room for the token ids of one call: each thread has its own."""

    def __init__(self) -> None:
        self.ids = (ctypes.c_uint32 * TOKENS_MAX)()
        self.found = memoryview(self.ids).cast("B")


def _ids(packed: bytes) -> memoryview:
    return memoryview(packed).cast("I")


def best_naming(path: Path = LIBRARY) -> Naming:
    """Return the functions of the library where it can be loaded, and Python's elsewhere."""
    try:
        return native_naming(path)
    except OSError as error:
        log.debug("blocks are named by Python: %s", error)
    except AttributeError:
        log.warning("blocks are named by Python: %s is of another version; make setup", path)
    return Naming(Hasher, None)


NAMING = best_naming()
"""The functions of this process, for all of its threads."""
