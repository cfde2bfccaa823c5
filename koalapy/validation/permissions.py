"""Check permissions of callers: jobs, owners, priorities, home sites and notifications."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from koalapy.model.errors import ForbiddenError, ProblemCode, UsageError, reject
from koalapy.model.identity import Identity, Permission, Role
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.notification import AllowedRecipients
from koalapy.model.users import Accounts
from koalapy.model.wording import format_list


def may_see_all_of(caller: Identity, job: Job) -> bool:
    """Return whether a caller may see all details of a job: owners their jobs, operators any job."""
    return caller.has_role(Role.OPERATOR) or owns(caller, job)


def owns(caller: Identity, job: Job) -> bool:
    """Return whether a job is the caller's. A job of the daemon is no user's, whatever its field ``owner`` says."""
    return job.spec.owner == caller.user and not job.spec.internal


def check_job_access(caller: Identity, job: Job) -> None:
    """Raise ``ForbiddenError`` if the caller is neither the owner of a job nor an operator."""
    if not may_see_all_of(caller, job):
        raise ForbiddenError(
            f"job {job.id} is not yours",
            field="job",
            value=job.id,
            hint="ask its owner or an operator of the grid; koala queue shows what all users may see of it",
            code=ProblemCode.NOT_OWNER,
        )


def check_reason(caller: Identity, jobs: Iterable[Job], reason: str) -> None:
    """Raise ``UsageError`` if one of the jobs is another user's and the caller gives no reason for the action."""
    if reason.strip():
        return
    job = next((job for job in jobs if not owns(caller, job)), None)
    if job is not None:
        raise missing_reason(f"job {job.id} is {job.spec.owner}'s", "its owner sees it")


def missing_reason(action: str, reader: str) -> UsageError:
    """Return the error for an action without the reason that it requires."""
    return UsageError(f"{action}, and reason is empty", field="reason", hint=f"give reason (--reason): {reader}")


@dataclass(frozen=True, slots=True)
class SubmissionRules:
    """The permissions of callers for fields of a submission."""

    high_priority: Permission = field(default_factory=Permission)
    role_of: Callable[[str], Role] = lambda _: Role.USER
    """Returns the highest role that a user has from any source."""
    reserved: Collection[str] = frozenset()
    """User names that are reserved for the daemon; only callers with such a name may submit for them."""

    def with_owner(self, spec: JobSpec, caller: Identity) -> JobSpec:
        """Return a submission with its owner, by default the caller.

        Raise ``ForbiddenError`` if the caller may not submit for that owner or with that priority. A program can do
        what its owner can, so callers cannot submit for an owner with a higher role.
        """
        owner = spec.owner or caller.user
        if owner != caller.user:
            self._check_owner(owner, caller)
        self.check_priority(spec.priority, caller, "submit with priority low")
        return spec.with_fields(owner=owner) if owner != spec.owner else spec

    def _check_owner(self, owner: str, caller: Identity) -> None:
        """Raise ``ForbiddenError`` if the caller may not submit jobs for another user, the ``owner``."""
        problem, hint = "", "leave it out to submit as yourself"
        if not caller.has_role(Role.OPERATOR):
            problem, hint = f"and you are {caller.user}", f"{hint}; only operators may submit for others"
        elif owner in self.reserved and caller.user not in self.reserved:
            problem = "a name that is reserved for the daemon"
        elif not caller.has_role(role := self.role_of(owner)):
            problem = f"whose role is {role} or may be, and yours is {caller.role}"
            hint = f"{hint}, or ask an administrator to submit it for {owner}"
        if problem:
            raise ForbiddenError(f"owner is {owner}, {problem}", field="owner", value=owner, hint=hint)

    def check_priority(self, priority: Priority, caller: Identity, remedy: str) -> None:
        """Raise ``ForbiddenError`` if the caller may not give jobs this priority."""
        if priority is not Priority.LOW and not self.high_priority.is_allowed_to(caller):
            raise ForbiddenError(
                f"priority is {priority}, which is not allowed to {caller.user} here",
                field="priority",
                value=priority,
                hint=f"{remedy}, or ask an operator: they may, and the setting high_priority allows it to others",
            )


def with_home_site(spec: JobSpec, caller: Identity, accounts: Accounts) -> JobSpec:
    """Return a submission with its home site, by default the site from which its owner comes or to which it belongs.

    Raise ``ForbiddenError`` unless the owner is known to be a user of the site, since each site prefers its own jobs.
    """
    login_site = caller.site or ""
    if login_site and (not caller.owns(spec.owner) or accounts.rejection_reason(spec.owner, login_site)):
        login_site = ""
    if not spec.home_site:
        home_site = login_site or accounts.home_of(spec.owner)
        return spec.with_fields(home_site=home_site) if home_site else spec
    sites = [*accounts.sites_of(spec.owner), *([login_site] if login_site else [])]
    if spec.home_site not in sites and not caller.has_role(Role.OPERATOR):
        membership = "not known to be a user of any cluster"
        if sites:
            membership = f"a user of {format_list(sorted(set(sites)))}"
        raise ForbiddenError(
            f"home_site is {spec.home_site}, and {spec.owner} is {membership}",
            field="home_site",
            value=spec.home_site,
            hint=f"leave it out, or ask an operator to submit it for you or to set users.{spec.owner}.home",
        )
    return spec


def check_notifications(spec: JobSpec, reachable: AllowedRecipients) -> None:
    """Raise ``UsageError`` for a recipient that is not allowed, and for ``mail_type`` without a recipient."""
    if spec.mail_user and (wrong := reachable.mail_problem(spec.mail_user)):
        allowed = ", ".join(reachable.recipients[:5])
        hint = f"give one of {allowed}" if allowed else "leave it out: no notifications.mail.recipients are configured"
        reject("mail_user", spec.mail_user, f"is refused: {wrong}", hint)
    if spec.webhook and (wrong := reachable.webhook_problem(spec.webhook)):
        allowed = ", ".join(sorted(reachable.hosts)[:5])
        hint = f"give one on {allowed}" if allowed else "leave it out: no notifications.webhooks are configured"
        reject("webhook", spec.webhook, f"is refused: {wrong}", hint)
    if spec.mail_type and not (spec.mail_user or spec.webhook):
        events = [str(event) for event in spec.mail_type]
        reject("mail_type", events, "is set without a recipient", "set mail_user or webhook")
