"""Extras of a request's first block: its salt, its adapter's content, the engine's generation.

A request whose blocks have no names still uses its adapter: the number is noted all the same.
"""

from __future__ import annotations

from kvbm_common.identity import ExtraTag, request_extras

from kvbm_connectors.vllm.adapters import AdapterRefused, Adapters
from kvbm_connectors.vllm.engine_types import EngineRequest
from kvbm_connectors.vllm.tracked import refusal_of_request

FirstExtras = tuple[tuple[ExtraTag, bytes], ...]


class RequestExtras:
    """Extras of all requests of one engine."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._generation = ""

    def begin(self, generation: str) -> None:
        """Name blocks by another generation from now on: the engine's caches were reset."""
        self._generation = generation
        self.adapters.forget()

    def named(self, request: EngineRequest) -> tuple[str, FirstExtras]:
        """Return why a request's blocks have no names, `""` if they have, and its extras."""
        refused = refusal_of_request(request)
        try:
            if not refused:
                return "", self.of(request)
            if request.lora_request is not None:
                self.adapters.check(request.lora_request)
        except AdapterRefused as error:
            refused = refused or error.code
        return refused, ()

    def of(self, request: EngineRequest) -> FirstExtras:
        """Return the extras of a request's first block. Raises AdapterRefused."""
        lora = request.lora_request
        value = None if lora is None else self.adapters.value_of(lora)
        found = request_extras(lora=value, salt=request.cache_salt, generation=self._generation)
        return tuple(found.get(0, ()))
