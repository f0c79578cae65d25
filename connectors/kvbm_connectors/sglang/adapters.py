"""Adapters: SGLang's LoRA by content, for the revision of a namespace.

SGLang begins the page keys of an adapter with its `lora_id`. One of `--lora-paths` has an id made
of its name and path alone, so that another adapter at that path has the same keys: the content of
all of them enters the revision. One that is loaded while the engine serves (`load_lora_adapter`,
also when SGLang loads a start's adapter again that it had given up) has a random id: its pages are
found by this life of the engine alone, and nothing more has to be known of it.

SGLang has loaded its adapters before the storage looks at them. Files that were changed after the
engine's process began say nothing of what it computes with, and the engine passes through. The time
of the last change (ctime) decides, which copying tools cannot set back: of files, the links on the
way to them, and the directories that hold a file or a link to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbm_connectors.client.weights import (
    UnreadableWeights,
    changed_ns,
    fingerprint,
    is_unchanged,
    resolve,
    signature,
)
from kvbm_connectors.sglang.variables import refuse_modelscope


def adapters_of(arguments: Any, since_ns: int) -> dict[str, str]:
    """Return the content of each adapter that the engine starts with, by its name.

    `since_ns` is when the engine's process began, on the wall clock. Raises UnreadableWeights.
    """
    enabled = getattr(arguments, "enable_lora", None)
    if enabled is False:  # SGLang ignores the paths then.
        return {}
    paths = dict(_paths(getattr(arguments, "lora_paths", None)))
    return {name: _content(name, path, since_ns) for name, path in sorted(paths.items())}


def _paths(given: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and paths of adapters, before SGLang has parsed its arguments and after."""
    if isinstance(given, Mapping):
        yield from ((str(name), str(path)) for name, path in given.items())
        return
    if given is not None and not isinstance(given, list | tuple):
        raise UnreadableWeights(f"lora_paths is a {type(given).__name__}")
    for entry in given or ():
        if isinstance(entry, str):
            name, _, path = entry.partition("=")
            yield name, path or name
        elif isinstance(entry, Mapping):
            yield _known(entry.get("lora_name"), entry.get("lora_path"))
        else:
            yield _known(getattr(entry, "lora_name", None), getattr(entry, "lora_path", None))


def _known(name: object, path: object) -> tuple[str, str]:
    if not name or not path:
        raise UnreadableWeights("lora_paths has an adapter without a name or a path")
    return str(name), str(path)


def _content(name: str, path: str, since_ns: int) -> str:
    refuse_modelscope(path)
    where = resolve(path)
    files = signature(where)
    content = fingerprint(where)
    if not is_unchanged(files):
        raise UnreadableWeights(f"the LoRA adapter {name} changes while it is read")
    if changed_ns(files) >= since_ns:
        raise UnreadableWeights(
            f"the files of the LoRA adapter {name} are younger than the engine: start it again"
        )
    return content


def process_start_ns() -> int:
    """Return when this process began, on the wall clock, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime ")
    )
    return boot * 10**9 + ticks * 10**9 // os.sysconf("SC_CLK_TCK")
