"""The route of alerts: what is wrong now, why, and what helps."""

from typing import Any

from fastapi import APIRouter

from koalapy.api.access import Caller
from koalapy.api.fields import Moment, Output
from koalapy.api.routes import api_router
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.model.alert import AlertKind, Severity


class AlertView(Output):
    """One thing that is wrong; its kind and target say which one it is."""

    kind: AlertKind
    severity: Severity
    target: str
    summary: str
    cause: str
    remedy: str
    """What helps: one sentence with a command."""
    since: Moment
    cluster: str
    """Empty where it is about none."""
    job: int | None
    user: str
    """Whose job it is about, or who it is about; empty where it is nobody's."""


class AlertList(Output):
    alerts: list[AlertView]
    """The most urgent first."""
    looked_at: Moment | None
    """When it was last looked for them; null before the first time."""


def alerts_router(alerts: Alerts) -> APIRouter:
    """What is wrong now."""
    router = api_router("health", "/alerts")

    @router.get("", response_model=AlertList)
    async def list_alerts(caller: Caller) -> Any:
        """What is wrong now, why, and what helps: operators are told all, others what concerns the clusters and their
        own jobs."""
        return {"alerts": alerts.told_to(caller), "looked_at": alerts.looked_at}

    return router
