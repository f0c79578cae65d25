"""Loading: arguments of an engine's loader that may bring weights from elsewhere than its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping

LOADER_OPTIONS = frozenset({
    "enable_multithread_load", "num_threads", "enable_weights_track", "distributed",
    "concurrency", "memory_limit", "pattern",
})  # fmt: skip
"""Options of an engine's `model_loader_extra_config` that say which files below the model's path
are read, and how."""


def refusal_of_format(load_format: str, local: Collection[str]) -> str:
    """Return why a load format may bring weights that the model's files do not hold, or `""`."""
    if load_format in local:
        return ""
    return (
        f"load_format {load_format} may take weights from elsewhere than the model's files; "
        f"allowed are dummy, {', '.join(sorted(local))}, or name the weights with `revision`"
    )


def refusal_of_options(options: object) -> str:
    """Return why loader options may bring weights that the model's files do not hold, or `""`."""
    if not isinstance(options, Mapping):
        return f"model_loader_extra_config is a {type(options).__name__}"
    unknown = sorted(map(str, set(options) - LOADER_OPTIONS))
    if unknown:
        return (
            f"model_loader_extra_config has {', '.join(unknown)}, which may bring weights from "
            f"elsewhere; allowed are {', '.join(sorted(LOADER_OPTIONS))}"
        )
    pattern = str(options.get("pattern") or "x.safetensors")
    if "/" in pattern or pattern.startswith(".") or not pattern.endswith(".safetensors"):
        return (
            f"model_loader_extra_config has the pattern {pattern}: files that it names are not "
            "looked at, unless they are *.safetensors in the model's directory without a dot first"
        )
    return ""
