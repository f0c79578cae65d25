"""Variables: which environment variables of an engine change the hash of its blocks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from kvbm_connectors.client.weights import UnreadableWeights, content_of


def variables_in_name(
    environ: Mapping[str, str],
    prefixes: tuple[str, ...],
    *,
    harmless: Collection[str],
    others: Collection[str],
) -> dict[str, str]:
    """Return the variables that are set and change what is computed, or may: those with one of the
    prefixes that are not harmless, and those of `others`."""
    return {
        variable: value
        for variable, value in environ.items()
        if (variable.startswith(prefixes) and variable not in harmless) or variable in others
    }


def contents_of_files(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of the file's content for each variable that names a file.

    A path says nothing of the content, and differs between hosts. Raises UnreadableWeights.
    """
    return {
        variable: content_of(value)
        for variable, value in variables.items()
        if os.path.isfile(value)
    }


def refuse_modelscope(model: str, *, asked: bool) -> None:
    """Raise UnreadableWeights where an engine asks ModelScope for a model, unless it is a path."""
    if asked and model and not os.path.exists(model):
        raise UnreadableWeights(f"{model} comes from ModelScope, whose cache is not looked into")
