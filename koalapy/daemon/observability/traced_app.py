"""Spans of jobs' ways, where the configuration names a collector for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from koalapy.config.settings import Settings
from koalapy.daemon.engine.engine import Engine
from koalapy.model.errors import UsageError


@contextmanager
def traced(settings: Settings, engine: Engine, instance: str) -> Iterator[None]:
    """``UsageError`` where the packages for that are missing."""
    if settings.tracing.endpoint is None:
        yield
        return
    try:
        from koalapy.daemon.observability.tracing import (
            Tracing,  # many packages, that most installations have no use for
        )
    except ModuleNotFoundError as error:
        raise UsageError(
            f"tracing.endpoint: the package {error.name} is missing",
            field="tracing.endpoint",
            hint="pip install 'koalapy[tracing]'",
        ) from error
    tracing = Tracing(settings.tracing.endpoint, instance)
    engine.subscribe(tracing.job_changed, tracing.attempt_ended)
    try:
        yield
    finally:
        tracing.stop()
