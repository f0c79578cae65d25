"""State: the objects that the routes share, and how they get at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from kvbm_common.access.http_access import Access
from kvbm_common.runtime.metrics import Metrics

from kvbm_metrics.shell.audit_log import AuditLog
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.jobs import Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The objects that the routes share."""

    fleet: Fleet
    expected: tuple[str, ...]
    """Kinds of services without which the system is not ready."""
    version: str
    expose_metrics: bool = True
    """DYN_KVBM_METRICS."""
    access: Access = field(default_factory=Access)
    jobs: Jobs = field(default_factory=Jobs)
    audit: AuditLog = field(default_factory=lambda: AuditLog(Metrics()))
    feeds: set[object] = field(default_factory=set)
    """The open event feeds."""


def _api(request: Request) -> Api:
    api = request.app.state.api
    assert isinstance(api, Api)
    return api


ApiOf = Annotated[Api, Depends(_api)]
