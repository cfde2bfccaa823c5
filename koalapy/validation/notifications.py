"""Whether a job's owner may have something told where he says."""

from koalapy.model.errors import reject
from koalapy.model.job import JobSpec
from koalapy.model.notification import Reachable


def check_notifications(spec: JobSpec, reachable: Reachable) -> None:
    """``UsageError`` for a place that is not reached from here, and for what is to be told nowhere."""
    if spec.mail_user and (wrong := reachable.why_no_mail(spec.mail_user)):
        named = ", ".join(reachable.recipients[:5])
        hint = f"give one of {named}" if named else "leave it out: no notifications.mail.recipients are configured"
        reject("mail_user", spec.mail_user, f"is refused: {wrong}", hint)
    if spec.webhook and (wrong := reachable.why_no_webhook(spec.webhook)):
        named = ", ".join(sorted(reachable.hosts)[:5])
        hint = f"give one on {named}" if named else "leave it out: no notifications.webhooks are configured"
        reject("webhook", spec.webhook, f"is refused: {wrong}", hint)
    if spec.mail_type and not (spec.mail_user or spec.webhook):
        told = [str(each) for each in spec.mail_type]
        reject("mail_type", told, "is given, and nobody is to be told", "say whom by mail_user or webhook")
