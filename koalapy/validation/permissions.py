"""Check permissions of callers: jobs, owners, priorities, home sites and notifications."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from koalapy.model.errors import ForbiddenError, ProblemCode, reject
from koalapy.model.identity import HighPriority, Identity, Role
from koalapy.model.job import Job, JobSpec, Priority
from koalapy.model.notification import AllowedRecipients
from koalapy.model.users import Accounts
from koalapy.model.wording import format_list


def may_see_all_of(by: Identity, job: Job) -> bool:
    """Return whether a caller may see all details of a job: owners their jobs, operators any job.

    The daemon's own jobs belong to no user, whatever their owner is called.
    """
    return by.has_role(Role.OPERATOR) or (job.spec.owner == by.user and not job.spec.internal)


def check_is_theirs(by: Identity, job: Job) -> None:
    """Raise ``ForbiddenError`` if the caller is neither the owner of a job nor an operator."""
    if not may_see_all_of(by, job):
        raise ForbiddenError(
            f"job {job.id} is not yours",
            field="job",
            value=job.id,
            hint="ask its owner or an operator of the grid; koala queue shows what all users may see of it",
            code=ProblemCode.NOT_OWNER,
        )


@dataclass(frozen=True, slots=True)
class SubmissionRules:
    """The permissions of callers for fields of a submission."""

    high_priority: HighPriority = field(default_factory=HighPriority)
    role_of: Callable[[str], Role] = lambda _: Role.USER
    """Returns the highest role that a user has from any source."""
    reserved: Collection[str] = frozenset()
    """User names that are reserved for the daemon; only callers with such a name may submit for them."""

    def with_owner(self, spec: JobSpec, by: Identity) -> JobSpec:
        """Return a submission with its owner, by default the caller.

        Raise ``ForbiddenError`` if the caller may not submit for that owner or with that priority. A program can do
        what its owner can, so callers cannot submit for an owner with a higher role.
        """
        owner = spec.owner or by.user
        if owner != by.user:
            self._check_owner(owner, by)
        self.check_priority(spec.priority, by, "submit with priority low")
        return replace(spec, owner=owner)

    def _check_owner(self, owner: str, by: Identity) -> None:
        problem, hint = "", "leave it out to submit as yourself"
        if not by.has_role(Role.OPERATOR):
            problem, hint = f"and you are {by.user}", f"{hint}; only operators may submit for others"
        elif owner in self.reserved and by.user not in self.reserved:
            problem = "which is a name of the daemon's own"
        elif not by.has_role(role := self.role_of(owner)):
            problem = f"whose role is {role} or may be, and yours is {by.role}"
            hint = f"{hint}, or ask an administrator to submit it for {owner}"
        if problem:
            raise ForbiddenError(f"owner is {owner}, {problem}", field="owner", value=owner, hint=hint)

    def check_priority(self, priority: Priority, by: Identity, way_out: str) -> None:
        """Raise ``ForbiddenError`` if the caller may not give jobs this priority."""
        if priority is not Priority.LOW and not self.high_priority.is_allowed_to(by):
            raise ForbiddenError(
                f"priority is {priority}, which is not allowed to {by.user} here",
                field="priority",
                value=priority,
                hint=f"{way_out}, or ask an operator: they may, and the setting high_priority allows it to others",
            )


def with_home_site(spec: JobSpec, by: Identity, accounts: Accounts) -> JobSpec:
    """Return a submission with its home site, by default the site from which its owner comes or to which it belongs.

    Raise ``ForbiddenError`` unless the owner is known to be a user of the site, since each site prefers its own jobs.
    """
    came_by = by.site if by.site and by.owns(spec.owner) and not accounts.rejection_reason(spec.owner, by.site) else ""
    if not spec.home_site:
        return replace(spec, home_site=came_by or accounts.home_of(spec.owner))
    sites = [*accounts.sites_of(spec.owner), *([came_by] if came_by else [])]
    if spec.home_site not in sites and not by.has_role(Role.OPERATOR):
        of = f"a user of {format_list(sorted(set(sites)))}" if sites else "not known to be a user of any cluster"
        raise ForbiddenError(
            f"home_site is {spec.home_site}, and {spec.owner} is {of}",
            field="home_site",
            value=spec.home_site,
            hint=f"leave it out, or ask an operator to submit it for you or to set users.{spec.owner}.home",
        )
    return spec


def check_notifications(spec: JobSpec, reachable: AllowedRecipients) -> None:
    """Raise ``UsageError`` for a recipient that is not allowed, and for ``mail_type`` without a recipient."""
    if spec.mail_user and (wrong := reachable.mail_problem(spec.mail_user)):
        named = ", ".join(reachable.recipients[:5])
        hint = f"give one of {named}" if named else "leave it out: no notifications.mail.recipients are configured"
        reject("mail_user", spec.mail_user, f"is refused: {wrong}", hint)
    if spec.webhook and (wrong := reachable.webhook_problem(spec.webhook)):
        named = ", ".join(sorted(reachable.hosts)[:5])
        hint = f"give one on {named}" if named else "leave it out: no notifications.webhooks are configured"
        reject("webhook", spec.webhook, f"is refused: {wrong}", hint)
    if spec.mail_type and not (spec.mail_user or spec.webhook):
        told = [str(each) for each in spec.mail_type]
        reject("mail_type", told, "is set without a recipient", "set mail_user or webhook")
