"""Say what vLLM's configuration consists of, and which variables it knows.

`python -m tests.vllm.fields_process` writes a JSON object: `fields` are the dotted paths of all
fields below VllmConfig, parts that are off by default included; `variables` are those of
`vllm.envs`; `lora` are the fields of LoRAConfig.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Iterator
from typing import Any

OWN = "vllm.config"


def part_of(hint: Any) -> Any:
    """The configuration's class that an annotation names, if it names one."""
    for one in (hint, *typing.get_args(hint)):
        if isinstance(one, type) and dataclasses.is_dataclass(one) and OWN in one.__module__:
            return one
        if one is not hint and typing.get_args(one) and (found := part_of(one)) is not None:
            return found
    return None


def fields_of(kind: Any, prefix: str, above: tuple[Any, ...]) -> Iterator[str]:
    """All paths below a class."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        part = part_of(hints[field.name])
        if part is None or part in above:
            yield prefix + field.name
        else:
            yield from fields_of(part, f"{prefix}{field.name}.", (*above, part))


def main() -> None:
    """vLLM writes to stdout too: the answer goes to a copy of it."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import envs
    from vllm.config import LoRAConfig, VllmConfig

    found = {
        "fields": sorted(fields_of(VllmConfig, "", (VllmConfig,))),
        "lora": sorted(field.name for field in dataclasses.fields(LoRAConfig)),
        "variables": sorted(n for n in envs.environment_variables if n.startswith("VLLM_")),
    }
    json.dump(found, ours)
    ours.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
