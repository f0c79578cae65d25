"""The common part of the index's answers over HTTP: partitions that are not in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class AnswerView(BaseModel):
    """An answer: made by us, so nothing is checked twice."""

    model_config = ConfigDict(frozen=True)

    missing: Annotated[
        list[int],
        Field(description="Partitions of the index without an answer: their hosts are not in it."),
    ] = []
