"""How often a job may be tried before it is given up (semantics 4 and 5); None is as often as it takes."""

from koalapy.model.job import Job
from koalapy.scheduler.rules import Rules


def scan_tries_all(rules: Rules) -> bool:
    """Whether a periodic scan is a failed try of all whom it leaves in their queue, not of the first only.

    One that ends at the first refusal has tried nobody behind it. But where the narrowest come first, those behind are
    overtaken by all that is narrower and comes later: else a wide one would have no tries, however long it waits, and
    nodes would never be kept for it.
    """
    return rules.queue == "scan" or rules.queue_order == "narrowest-first"


def placement_limit(job: Job, rules: Rules) -> int | None:
    """The most tries to place a job."""
    own = job.spec.max_placement_tries
    return own if own is not None else rules.max_placement_tries


def claiming_limit(job: Job, rules: Rules) -> int | None:
    """The most claiming tries of a job."""
    own = job.spec.max_claiming_tries
    return own if own is not None else rules.max_claiming_tries


def may_not_be_claimed(job: Job, rules: Rules) -> bool:
    """Whether a job has had all its claiming tries."""
    limit = claiming_limit(job, rules)
    return limit is not None and job.claiming_tries >= limit


def tries_used_up(job: Job, rules: Rules) -> str:
    """Which tries are used up of a job whose claim has failed, in words; empty when it may be tried again."""
    if may_not_be_claimed(job, rules):
        return f"not claimed in {claiming_limit(job, rules)} tries"
    limit = placement_limit(job, rules)
    if limit is not None and job.placement_tries >= limit:
        return f"not placed in {limit} tries"
    return ""
