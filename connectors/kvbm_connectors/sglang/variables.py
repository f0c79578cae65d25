"""Variables: what SGLang's environment says of what is computed, and with which weights."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvbm_connectors.client import variables
from kvbm_connectors.sglang.harmless import HARMLESS_VARIABLES, OTHER_VARIABLES, PREFIXES

MODELSCOPE = "SGLANG_USE_MODELSCOPE"
OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
FALSE_VALUES = ("", "0", "false", "no", "n", "f", "off")


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are part of a page's name; a file counts by its content."""
    found = variables.variables_in_name(
        environ, PREFIXES, harmless=HARMLESS_VARIABLES, others=OTHER_VARIABLES
    )
    return found | variables.contents_of_files(found)


def refuse_modelscope(model: str) -> None:
    """Raise UnreadableWeights where SGLang asks ModelScope for this model."""
    asked = os.environ.get(MODELSCOPE, "").strip().lower() not in FALSE_VALUES
    variables.refuse_modelscope(model, asked=asked)
