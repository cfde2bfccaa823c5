"""What somebody may do with jobs: their own, others', and in whose name."""

from collections.abc import Callable
from dataclasses import replace

from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobSpec, Priority
from koalapy.model.users import Accounts
from koalapy.model.wording import listed


def may_see_all_of(by: Identity, job: Job) -> bool:
    """Users their own jobs, operators everybody's; the daemon's own are no user's, whatever they are called."""
    return by.may(Role.OPERATOR) or (job.spec.owner == by.user and not job.spec.internal)


def check_is_theirs(by: Identity, job: Job) -> None:
    """``ForbiddenError`` for a job of somebody else's."""
    if not may_see_all_of(by, job):
        raise ForbiddenError(
            f"job {job.id} is not yours",
            field="job",
            value=job.id,
            hint="ask its owner or an operator of the grid; koala queue tells what everybody may see of it",
        )


def in_the_name_of(spec: JobSpec, by: Identity, high_priority: Role, role_of: Callable[[str], Role]) -> JobSpec:
    """A submission with its owner, who is who submits it: ``ForbiddenError`` when only an operator may ask for that.

    ``high_priority`` is the least role that may ask for more than low priority; ``role_of`` says what somebody may do,
    for whoever has a job run as another's account can do what he can.
    """
    owner = spec.owner or by.user
    if owner != by.user and not by.may(Role.OPERATOR):
        raise ForbiddenError(
            f"owner is {owner}, and you are {by.user}",
            field="owner",
            value=owner,
            hint="leave it out: a job is whose who submits it; operators may submit for others",
        )
    if owner != by.user and not by.may(role_of(owner)):
        raise ForbiddenError(
            f"owner is {owner}, whose role is {role_of(owner)}, and yours is {by.role}",
            field="owner",
            value=owner,
            hint="leave it out: a job is whose who submits it",
        )
    check_priority(spec.priority, by, high_priority, "submit with priority low")
    return replace(spec, owner=owner)


def with_home_site(spec: JobSpec, by: Identity, accounts: Accounts) -> JobSpec:
    """A submission with its home site, where one is known: by itself the one that its owner comes from or belongs to.

    ``ForbiddenError`` for a site of which the owner is known not to be: what is a site's goes first there.
    """
    came_by = by.site if by.site and by.owns(spec.owner) and not accounts.why_not(spec.owner, by.site) else ""
    if not spec.home_site:
        return replace(spec, home_site=came_by or accounts.home_of(spec.owner))
    sites = [*accounts.sites_of(spec.owner), *([came_by] if came_by else [])]
    if sites and spec.home_site not in sites and not by.may(Role.OPERATOR):
        raise ForbiddenError(
            f"home_site is {spec.home_site}, and {spec.owner} is a user of {listed(sorted(set(sites)))}",
            field="home_site",
            value=spec.home_site,
            hint="leave it out, or ask an operator of the grid to submit it for you",
        )
    return spec


def check_priority(priority: Priority, by: Identity, high_priority: Role, way_out: str) -> None:
    """``ForbiddenError`` where ``high_priority``, the least role for more than low priority, is more than theirs."""
    if priority is not Priority.LOW and not by.may(high_priority):
        raise ForbiddenError(
            f"priority is {priority}, which only an operator may ask for here",
            field="priority",
            value=priority,
            hint=f"{way_out}, or ask an operator of the grid to do it for you",
        )
