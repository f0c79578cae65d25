"""Variables: which of an engine's environment variables are part of a name. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def variables_that_enter(
    environ: Mapping[str, str],
    prefixes: tuple[str, ...],
    *,
    harmless: Collection[str],
    others: Collection[str] = (),
) -> dict[str, str]:
    """Return the variables that are set and change what is computed, or may: those with one of the
    prefixes that are not harmless, and those of `others`."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(prefixes) and name not in harmless) or name in others
    }
