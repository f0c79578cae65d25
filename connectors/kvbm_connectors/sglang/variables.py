"""Variables: what SGLang's environment says of what is computed, and with which weights."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvbm_connectors.client.variables import variables_that_enter
from kvbm_connectors.client.weights import UnreadableWeights
from kvbm_connectors.sglang.harmless import HARMLESS_VARIABLES

PREFIXES = ("SGLANG_",)
OTHER_VARIABLES = frozenset({
    "AITER_FORCE_A8W4", "AITER_SITUV2_A4W4", "AITER_SITUV2_A8W4", "CK_MOE",
    "DEEP_NORMAL_MODE_USE_INT8_QUANT", "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6", "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "FLA_USE_FAST_OPS",
    "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "ROCM_QUICK_REDUCE_QUANTIZATION",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", "USE_ROCM_AITER_ROPE_BACKEND",
    "USE_TRITON_W8A8_FP8_KERNEL",
})  # fmt: skip
"""Variables with another prefix that SGLang's kernels look at."""
MODELSCOPE = "SGLANG_USE_MODELSCOPE"
OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
NOT_SET = ("", "0", "false", "no", "n", "f", "off")


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are part of a page's name."""
    return variables_that_enter(
        environ, PREFIXES, harmless=HARMLESS_VARIABLES, others=OTHER_VARIABLES
    )


def refuse_modelscope(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UnreadableWeights where SGLang asks ModelScope for what has this name."""
    asked = environ.get(MODELSCOPE, "").strip().lower() not in NOT_SET
    if asked and name and not os.path.exists(name):
        raise UnreadableWeights(f"{name} comes from ModelScope, whose cache is not looked into")
