"""Adapters: LoRA by content, for the names of a request's blocks.

The connector reads an adapter's files when a request brings it for the first time, and looks at
their times with every further request. vLLM loads files on request, keeps them while there
is room, and names its own device blocks by the adapter's name and path. So once the files of an
adapter have changed, or its number stands for another one, it is not known what the engine
computes with, nor what its device cache still holds: requests that use it pass through. So do
those of both adapters, until the caches are reset, and of the number as long as it is remembered:
vLLM may have computed either with the other's weights.

vLLM may have loaded an adapter long before its first request, and keeps it over a reset. So files
that were changed after the engine began say nothing of what it computes with: such an adapter
passes through for the engine's life. The time of the last change (ctime) decides, which copying
tools cannot set back: of the files, the links on the way to them, and the directories that hold a
file or a link to it. A directory further up that is renamed is not seen: its time changes with
everything in it.

An operator may vouch that files are final: they stay as they are once vLLM may have loaded them, so
that they can be read at first sight, however young. What is seen to change is refused all the same.

An adapter by a hub's name lies in a snapshot, and another one is loaded when the hub's `main`
moves: what the cache has as `main` counts as one of the files.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_common.errors import KvbmError
from kvbm_common.identity import lora_extra
from kvbm_common.wire.local_fields import Adapter

from kvbm_connectors.client.weights import (
    Signature,
    UnreadableWeights,
    changed_ns,
    choice_of,
    fingerprint,
    is_unchanged,
    resolve,
    signature,
)
from kvbm_connectors.vllm.loading import refuse_modelscope

ADAPTERS_MAX = 4096
"""Adapters between two resets. Requests of further ones pass through, as what is forgotten cannot
be seen to change. Where files are final, the oldest is forgotten."""

NUMBERS_OF_ONE = 16
"""Numbers of one adapter that the consolidator hears of, the newest: a server gives another one
with each load, and requests use those that it has now."""
NUMBERS_IN_USE = 256
"""Numbers of one adapter where those that were left out are used again. The consolidator does
without further ones: to tell each in turn would take a message with each request."""
NEVER_NS = 2**63
REPLACED = ("", "", "")
"""Stands in the place of an adapter for a number that was several adapters'."""
WARNED_MAX = 256
"""Adapters and reasons that are logged, each once; all refusals are counted."""
WAYS_OUT = {
    "lora_changed": "give each version of it a path and a number of its own",
    "lora_recent": "restart the engine, or vouch for the files of adapters with the option "
                   '"lora_files": "final" of the connector',
    "lora_unreadable": "have its files where the engine's scheduler can read them",
    "lora_in_memory": "load it from files",
    "lora_in_place": "load each version under a name and path of its own, without load_inplace",
    "lora_too_many": "reset the engine's caches",
    "lora_unknown": "restart the engine, and report the error that its log has",
}  # fmt: skip
"""Reason → what an operator can do about it."""

log = logging.getLogger(__name__)

Said = Callable[[list[Adapter]], None]
Key = tuple[str, str, str]
"""Name, path and format of an adapter's weights, which a request may say."""


class AdapterRefused(KvbmError):
    """Blocks computed with this adapter have no names; `code` says why."""

    code = "lora"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter's files, and their content when they were read."""

    files: Signature
    content: str


class Adapters:
    """All adapters of one engine. Used by the scheduler's thread alone."""

    def __init__(
        self,
        said: Said = lambda adapters: None,
        *,
        applied: str = "",
        since_ns: int = NEVER_NS,
        final: bool = False,
    ) -> None:
        """Create an empty set of adapters. `said` is called with all adapters whenever one is new.
        `applied` stands for how this engine applies adapters (`application_of`).

        `since_ns` is when the engine began, on the wall clock: files changed later are refused,
        unless files are `final`.
        """
        self.lost = False
        """True: it is not known any more what vLLM has loaded, and all are refused."""
        self._said = said
        self._final = final
        self._warned: set[tuple[str, str]] = set()
        self._since_ns = since_ns
        self._applied = applied
        self._known: dict[Key, _Known] = {}
        self._formats: dict[tuple[str, str], Key] = {}
        """Name and path → the adapter that had them first: vLLM's own cache tells adapters apart by
        these alone."""
        self._numbers: dict[int, Key] = {}
        """The ADAPTERS_MAX numbers that were used last, and what each stands for. A reset leaves
        them, as vLLM keeps what it has loaded under a number."""
        self._loaded: dict[int, Key] = {}
        """Numbers of adapters that vLLM has loaded, and no request has used yet."""
        self._mixed: set[Key] = set()
        """Adapters with such a number: the device's cache may have blocks of one under the name of
        another, until a reset."""
        self._has_more = False
        """True: adapters were added to these, and `note_load` has not told of them."""
        self._told: dict[int, Key] = {}
        """Number → the adapter that the consolidator knows by it. An adapter has NUMBERS_IN_USE
        numbers at most."""

    def value_of(self, lora: Any) -> str:
        """Return what stands for an adapter in names. Raises AdapterRefused."""
        key = _key_of(lora)
        try:
            return self._value_of(lora, key)
        except AdapterRefused as refused:
            self._warn(key[0], refused)
            raise

    def check(self, lora: Any) -> None:
        """Note the adapter of a request. Raises AdapterRefused where vLLM may compute it with
        other weights than those of its files."""
        number, key = int(lora.lora_int_id), _key_of(lora)
        if self.lost:
            raise AdapterRefused("lora_unknown", "a load of an adapter could not be followed")
        if _tensors_of(lora) is not None:
            self._distrust(number, key)
            raise AdapterRefused("lora_in_memory", f"{key[0]} has no files")
        if getattr(lora, "load_inplace", False):
            self._distrust(number, key)
            raise AdapterRefused("lora_in_place", f"vLLM reads {key[0]} again in each step")
        self._note(number, key)
        if key in self._mixed:
            raise AdapterRefused("lora_changed", f"a number of {key[0]} was another's")
        if len(self._mixed) >= ADAPTERS_MAX:
            raise AdapterRefused("lora_too_many", f"{ADAPTERS_MAX} adapters had numbers of others")

    def note_load(self, lora: Any, *, failed: bool = False, kept: bool = True) -> bool:
        """Note that vLLM has loaded an adapter; return whether more requests may be computed with
        other weights than they were named by: those that `may_share` it.

        A load that has `failed` may have put some weights in the place of a number's others, or,
        where vLLM has `kept` the number, of none.
        """
        number, key = int(lora.lora_int_id), _key_of(lora)
        in_memory = _tensors_of(lora) is not None
        if number not in self._numbers and number not in self._loaded:
            if kept:
                self._loaded[number] = REPLACED if in_memory or failed else key
            if len(self._loaded) > ADAPTERS_MAX:
                del self._loaded[next(iter(self._loaded))]
            return False
        if failed or in_memory:
            self._distrust(number, key)
        elif self._loaded.get(number) != key:
            self._look_at(number, key)
        has_more, self._has_more = self._has_more, False
        return has_more

    def _look_at(self, number: int, key: Key) -> None:
        """Refuse an adapter whose number was another's, or whose files have changed."""
        try:
            self._note(number, key)
        except AdapterRefused:
            return
        known = self._known.get(key)
        if known is not None and not is_unchanged(known.files):
            self._mix({key})

    def may_share(self, lora: Any, other: Any) -> bool:
        """Return whether blocks of an adapter may be computed with the weights of one that was
        replaced: it has the same number or name, or had a number of others."""
        key = _key_of(lora)
        same = lora.lora_int_id == other.lora_int_id or key[:2] == _key_of(other)[:2]
        return same or key in self._mixed or len(self._mixed) >= ADAPTERS_MAX

    def _warn(self, name: str, refused: AdapterRefused) -> None:
        """Say once for each adapter and reason why it is not cached, and the way out."""
        if (name, refused.code) not in self._warned and len(self._warned) < WARNED_MAX:
            self._warned.add((name, refused.code))
            log.warning("requests with the LoRA adapter %r are not cached (%s: %s): %s",
                        name, refused.code, refused, WAYS_OUT[refused.code])  # fmt: skip

    def _value_of(self, lora: Any, key: Key) -> str:
        number = int(lora.lora_int_id)
        again = number in self._numbers
        self.check(lora)
        known = self._known.get(key)
        if known is None:
            known = self._read(lora, key)
        elif not is_unchanged(known.files):
            raise AdapterRefused("lora_changed", f"the files of {lora.lora_name} have changed")
        if self._told.get(number) != key:
            self._tell(number, key, again=again)
        return lora_extra(key[0], known.content)

    def _note(self, number: int, key: Key) -> None:
        """Note what a number stands for. Raises AdapterRefused where it was something else, or
        another number stands for the same in another format."""
        known = self._remember(number, key)
        if known != key:
            self._distrust(number, key)
            raise AdapterRefused("lora_changed", f"{number} was {known}")
        first = self._formats.setdefault(key[:2], key)
        if first != key:
            self._mix({first, key})
            raise AdapterRefused("lora_changed", f"the weights of {key[0]} have two formats")
        if len(self._formats) > ADAPTERS_MAX:
            del self._formats[next(iter(self._formats))]

    def _remember(self, number: int, key: Key) -> Key:
        """Return what a number stands for, `key` if it is new, and count it as used last: vLLM
        keeps the adapters that were used last."""
        loaded = self._loaded.pop(number, key)
        known = self._numbers[number] = self._numbers.pop(number, loaded)
        if len(self._numbers) > ADAPTERS_MAX:
            del self._numbers[next(iter(self._numbers))]
        return known

    def _distrust(self, number: int, key: Key) -> None:
        """Refuse a number from now on, and until a reset the adapters that it stood for."""
        known = self._remember(number, key)
        self._numbers[number] = REPLACED
        self._mix({known, key} - {REPLACED}, number)

    def _mix(self, keys: set[Key], *numbers: int) -> None:
        """Refuse adapters until a reset. The consolidator names no block by them any more, nor by
        these numbers."""
        self._has_more |= not keys <= self._mixed
        if len(self._mixed) < ADAPTERS_MAX:
            self._mixed |= keys
        untold = [one for one, told in self._told.items() if one in numbers or told in keys]
        for one in untold:
            del self._told[one]
        if untold:
            self._said(self._all())

    def _tell(self, number: int, key: Key, *, again: bool) -> None:
        """Tell the consolidator of a number, in the place of the oldest where there are many.

        One that was left out, and is used `again`, takes no other's place.
        """
        self._told.pop(number, None)
        same = [one for one, other in self._told.items() if other == key]
        if again and len(same) >= NUMBERS_IN_USE:
            return
        if not again and len(same) >= NUMBERS_OF_ONE:
            old = same[:1]
        else:
            old = list(self._told)[: -ADAPTERS_MAX + 1]
        for one in old:
            del self._told[one]
        self._told[number] = key
        self._said(self._all())

    def _read(self, lora: Any, key: Key) -> _Known:
        if len(self._known) >= ADAPTERS_MAX:
            self._forget_oldest()
        path = os.path.expanduser(key[1])  # As vLLM does.
        try:
            refuse_modelscope(path)
            where = resolve(path) if path else Path(path)
            files = signature(where)
            if where != Path(path):
                files = {**files, **choice_of(where)}
            content = f"{fingerprint(where)}/{key[2]}/{self._applied}"
            if not is_unchanged(files):
                raise AdapterRefused("lora_changed", f"{key[0]} changes while it is read")
            if changed_ns(files) >= self._since_ns and not self._final:
                raise AdapterRefused("lora_recent", f"{key[0]} is younger than the engine")
        except UnreadableWeights as error:
            raise AdapterRefused("lora_unreadable", str(error)) from error
        digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        known = self._known[key] = _Known(files, digest)
        return known

    def _forget_oldest(self) -> None:
        """Make room for an adapter. Raises AdapterRefused, unless files are final."""
        if not self._final:
            raise AdapterRefused("lora_too_many", f"{ADAPTERS_MAX} adapters are known")
        oldest = next(iter(self._known))
        del self._known[oldest]
        self._told = {number: key for number, key in self._told.items() if key != oldest}

    def _all(self) -> list[Adapter]:
        return [
            Adapter(id=number, name=key[0], content=self._known[key].content)
            for number, key in self._told.items()
        ]

    def forget(self) -> None:
        """Read all files again, unless they are final: the engine's caches were reset."""
        if not self._final:
            self._known.clear()
        self._told.clear()
        self._mixed.clear()
        self._formats.clear()


def _tensors_of(lora: Any) -> Any:
    """Return an adapter's weights where a request brings them itself, without files."""
    return getattr(lora, "lora_tensors", None)


def _key_of(lora: Any) -> Key:
    path = str(getattr(lora, "lora_path", "") or getattr(lora, "lora_local_path", ""))
    return str(lora.lora_name), path, str(getattr(lora, "is_3d_lora_weight", ""))
