"""Puts together who tells users and operators of jobs and alerts."""

from pathlib import Path

from koalapy.config.settings import Settings
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.notifications.channels import Mail, Sender, Webhooks
from koalapy.daemon.alerts.notifications.outgoing import Notifications
from koalapy.daemon.engine.engine import Engine
from koalapy.model.errors import UsageError
from koalapy.model.notification import Channel
from koalapy.store.opening import Stores
from koalapy.system.tls import Trust


def notifications_of(settings: Settings, stores: Stores, engine: Engine, alerts: Alerts) -> Notifications:
    """Told of jobs by the engine, and of alerts; ``UsageError`` for certificates that cannot be read."""
    section = settings.notifications
    try:
        context = Trust(Path(section.ca_file) if section.ca_file else None).context()
    except OSError as error:
        raise UsageError(
            f"notifications.ca_file: {error}",
            field="notifications.ca_file",
            value=section.ca_file,
            hint="give a file with certificates in PEM, or leave it out",
        ) from error
    senders: dict[Channel, Sender] = {}
    if section.mail is not None:
        senders["mail"] = Mail(section.mail, context)
    if section.webhooks:
        secrets = {host: own.secret for host, own in section.webhooks.items()}
        senders["webhook"] = Webhooks(secrets, context)
    found = Notifications(stores.notifications, senders, section, engine.clock, engine.queries.jobs)
    engine.notifier = found
    alerts.observe(found.alert_changed)
    return found
