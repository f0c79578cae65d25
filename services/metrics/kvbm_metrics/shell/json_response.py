"""JSON over HTTP, rendered by orjson."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import JSONResponse


class OrjsonResponse(JSONResponse):
    """What a route returns, checked by pydantic. FastAPI deprecates its own class for this."""

    def render(self, content: Any) -> bytes:
        """Return the body as JSON."""
        return orjson.dumps(content)
