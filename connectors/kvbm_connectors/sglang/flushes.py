"""Flushes of SGLang's caches: in an engine whose weights are pushed, pages have other names then.

RL frameworks write new weights into a running engine, and SGLang flushes its own cache. It tells a
storage of neither. Both show all the same: a flush clears each host pool, which replaces its
tables, and the model runner is watched (`pushes.py`). SGLang's configuration holds the version and
the path of the weights that serve. What the tiers hold was computed with the old ones.

SGLang flushes when nothing is on its way: its storage threads have ended, and the tables come after
that. So a page that a call has named before is computed with the weights of before.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbm_common.runtime.logs import OncePerKind

from kvbm_connectors.client.engine_options import forgets
from kvbm_connectors.sglang.generation import DIRECTORY

log = logging.getLogger(__name__)

TABLES = ("slot_used", "mem_state", "_slots")
"""Tables of a host pool that SGLang replaces when it clears it, and at no other time."""
MARKS: Mapping[str, str] = {
    "enable_memory_saver": "weights and cache leave the device between two steps of a trainer",
    "rl_on_policy_target": "a trainer's kernels are matched",
    "custom_weight_loader": "it loads updates alone",
    "checkpoint_engine_wait_weights_before_ready": "a checkpoint engine pushes weights",
    "rl_quant_profile": "weights that are pushed are quantized",
    "enable_return_routed_experts": "a trainer replays the experts that were chosen",
    "enable_return_indexer_topk": "a trainer replays what the indexer has chosen",
}
"""Arguments that engines of trainers have, and what each is for."""
PUSHED_FORMATS = frozenset({"dummy", "flash_rl"})
"""Load formats whose weights come later, or are loaded again while the engine serves."""
VALUE_BYTES = 8
WRITE_AGAIN_S = 1.0
"""The shortest time from a write that failed to the next one."""


def marks_of_pushed_weights(arguments: Any) -> list[str]:
    """Return what says that weights will change while the engine runs. `arguments` are SGLang's."""
    found = [name for name in MARKS if getattr(arguments, name, None)]
    kind = getattr(arguments, "load_format", None)
    if str(getattr(kind, "value", kind)) in PUSHED_FORMATS:
        found.append("load_format")
    return found


class FlushWatch:
    """Sees that SGLang has flushed its caches, or serves other weights. Not thread-safe."""

    def __init__(
        self,
        choice: str = "auto",
        *,
        is_pushed: bool = False,
        serving: Callable[[], object] = lambda: None,
        updates: Callable[[], int] = lambda: 0,
        pushes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Forget by `choice` (the option `plain_reset`), and `is_pushed`: there were marks.

        `serving` returns what SGLang says of the weights that serve now (None: nothing), and
        `pushes` how often some were written: both are asked at each call. `updates` returns how
        often SGLang has noted others.
        """
        self.counts: Counter[str] = Counter()
        self.forgets = forgets(choice, pushed=is_pushed)
        self._may_learn = choice == "auto"
        self._serving, self._updates, self._pushes = serving, updates, pushes
        self._served, self._updated, self._pushed = serving(), updates(), pushes()
        self._pools: list[Any] = []
        self._tables: list[tuple[object, ...]] = []

    def add(self, pool: Any) -> None:
        """Watch this host pool from now on."""
        self._pools.append(pool)
        self._tables.append(_tables_of(pool))

    @property
    def is_blind(self) -> bool:
        """Tell whether no pool has a table that would show a flush."""
        return not any(self._tables)

    def is_due(self) -> bool:
        """Return whether all that was stored so far is to be forgotten now.

        Weights that were updated make an engine one whose weights are pushed, whatever its marks.
        """
        is_updated = self._is_updated()
        is_flushed = self._is_flushed()
        if not (is_updated or is_flushed):
            return False
        if self._may_learn and not self.forgets:
            self.forgets = is_updated or self._updates() != self._updated
        self.counts["flushes_forgotten" if self.forgets else "flushes_kept"] += 1
        return self.forgets

    def _is_updated(self) -> bool:
        pushed_before, self._pushed = self._pushed, self._pushes()
        is_pushed = self._pushed != pushed_before
        if (now := self._serving()) is None:
            return is_pushed
        before, self._served = self._served, now
        return is_pushed or before not in (None, now)

    def _is_flushed(self) -> bool:
        before, self._tables = self._tables, [_tables_of(pool) for pool in self._pools]
        return any(
            one is not other
            for old, new in zip(before, self._tables, strict=True)
            for one, other in zip(old, new, strict=False)
        )


def _tables_of(pool: Any) -> tuple[object, ...]:
    """Return the tables of a pool, without what it computes when asked: that always differs."""
    attributes = getattr(pool, "__dict__", {})
    return tuple(attributes[name] for name in TABLES if name in attributes)


def flushed_path(state_dir: Path, namespace: bytes, life: bytes, replica: int) -> Path:
    """Return where ranks of an engine that share pages of a namespace tell each other."""
    return state_dir / DIRECTORY / f"{namespace.hex()[:32]}.{life.hex()}.{replica}.flushed"


class EngineGeneration:
    """The part of page names that an engine draws when it forgets; empty before the first time.

    Ranks that share pages find the value in a file of the host. Ranks that store begin another one,
    and do so before they store: no page has the name of one that older weights made. The others
    follow. Until then they may find what was stored before; SGLang loads what all ranks find.
    """

    def __init__(self, path: Path | None = None, *, is_writer: bool = True) -> None:
        """Keep the value at `path`, where ranks share pages; None: in this process alone."""
        self._path, self._is_writer = path, is_writer
        self._lock = threading.Lock()
        self._limiter = OncePerKind(log)
        self._value = b""
        self._is_untold = False
        """Our value is not in the file: a write has failed. What the file holds is older."""
        self._next_write_s = 0.0
        self.close()  # An earlier attachment of this engine may have left a file.

    def read(self) -> bytes:
        """Return the present value; a writer replaces a file that is lost, or could not be written.

        Raises OSError when the file is there and cannot be read.
        """
        with self._lock:
            if self._path is None:
                return self._value
            found = self._found(self._path)
            if self._is_untold:
                if time.monotonic() >= self._next_write_s:
                    self._write(self._path)
            elif found:
                self._value = found
            elif not found and not self._is_writer:
                self._value = b""
            elif not found and self._value:
                self._write(self._path)
            return self._value

    def renew(self) -> None:
        """Begin another value, where this rank may store."""
        with self._lock:
            if not self._is_writer:
                return
            self._value = secrets.token_bytes(VALUE_BYTES)
            if self._path is not None:
                self._write(self._path)

    def _found(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def _write(self, path: Path) -> None:
        """Tell the others. Where that fails they find nothing of what is stored until a later read
        has written it."""
        self._is_untold = True
        draft = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(self._value)
            os.replace(draft, path)
            self._is_untold = False
        except OSError as error:
            self._next_write_s = time.monotonic() + WRITE_AGAIN_S
            self._limiter.warning(
                "unwritable", f"other ranks find no page until {path} is written: {error}"
            )
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the file. An engine that is killed leaves it, and no other engine reads it."""
        if self._path is not None and self._is_writer:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
