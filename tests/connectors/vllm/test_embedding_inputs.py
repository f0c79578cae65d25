"""vLLM's rule for embedding inputs, on a configuration with its three parts; the real one is run by
`tests/vllm/test_multimodal.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvbm_connectors.vllm.embedding_inputs import keep_as_configured


def inputs_of(connector: str, *, allowed: bool = False, embeds: bool = False) -> tuple[bool, bool]:
    """The two settings after the rule: embeddings are taken, and without their tensor."""

    class Config:
        def __init__(self) -> None:
            settings = SimpleNamespace(enable_mm_embeds=allowed, allow_missing_mm_embeddings=False)
            self.model_config = SimpleNamespace(multimodal_config=settings)
            self.kv_transfer_config = SimpleNamespace(kv_connector=connector)
            self.ec_transfer_config = SimpleNamespace(is_ec_consumer=embeds)

        def _resolve_mm_embedding_inputs(self) -> None:
            settings = self.model_config.multimodal_config
            settings.enable_mm_embeds = settings.allow_missing_mm_embeddings = True

        def resolve(self) -> None:
            self._resolve_mm_embedding_inputs()

    keep_as_configured(Config)
    keep_as_configured(Config)
    config = Config()
    config.resolve()
    found = config.model_config.multimodal_config
    return found.enable_mm_embeds, found.allow_missing_mm_embeddings


@pytest.mark.parametrize("connector", ["KvbmConnector", "DynamoConnector"])
def test_with_kvbm_alone_an_operator_decides(connector: str) -> None:
    assert inputs_of(connector) == (False, False)
    assert inputs_of(connector, allowed=True) == (True, False)


def test_decode_workers_take_what_they_are_sent() -> None:
    """Goal: vLLM's rule stands for other connectors, and where embeddings come from a worker."""
    for connector in ("NixlConnector", "PdConnector", "MultiConnector"):
        assert inputs_of(connector) == (True, True)
    assert inputs_of("KvbmConnector", embeds=True) == (True, True)


def test_a_vllm_without_the_rule_is_left_alone() -> None:
    class Config:
        """A version before 0.32."""

    keep_as_configured(Config)
    assert not [name for name in vars(Config) if name.startswith("_resolve")]
