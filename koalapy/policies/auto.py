"""The advisor (semantics 9): decide whether to co-allocate a job, by the statistics of its application."""

from dataclasses import replace
from itertools import takewhile

from koalapy.model.advice import Advice, Option
from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.job_sizes import describe_sizes
from koalapy.model.placement import ClusterReason, Placement, Refusal, RefusalKind
from koalapy.model.request import FixedRequest, FlexibleRequest, Request, RequestType
from koalapy.model.wording import format_nodes, format_time
from koalapy.policies.alternatives import (
    NOTHING,
    Alternative,
    Choosing,
    find_multi_cluster_now,
    find_single_cluster_later,
    find_single_cluster_now,
)
from koalapy.policies.fixed import Fixed
from koalapy.policies.knowledge import HOPELESS, PAYS_UP_TO, SURE, Knowledge
from koalapy.policies.policy import idle_that_suffices, nothing_usable, reason_for, with_idle

FIXED = Fixed()
ROUNDING = 1e-9
MAX_WAIT = 600.0
"""Maximum seconds for which a job of unknown run time waits for one cluster while several clusters have the nodes."""


class Auto:
    """One cluster now, several now, or one cluster later: whichever is predicted to be over first.

    ``informed`` returns the policy for one job, with the statistics of its application. If one cluster has enough idle
    nodes, the job starts there. If only several clusters together have them, and one cluster would have them once jobs
    of this scheduler have ended, the predicted response times decide; if they are unknown, the slowdown decides. A job
    does not wait longer than it would run on several clusters, unless co-allocation would harm other waiting jobs:
    these may then repeatedly take the nodes it waits for.
    """

    name = "auto"
    serves: frozenset[RequestType] = frozenset({"fixed", "nonfixed", "flexible"})
    learns = True
    keeps_together = True
    """A component is not placed again separately while nodes are claimed for it: the number of clusters was chosen."""

    def __init__(self, knowledge: Knowledge = NOTHING) -> None:
        self._knowledge = knowledge

    def informed(self, knowledge: Knowledge) -> "Auto":
        return Auto(knowledge)

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if isinstance(request, FixedRequest):
            return self._place_fixed(request, grid)
        if not grid.by_idle:
            return Refusal(nothing_usable(grid), RefusalKind.CLUSTERS)
        alone = find_single_cluster_now(request, grid, self._knowledge)
        if alone is not None:
            return self._alone_or_faster(alone, request, grid)
        together = find_multi_cluster_now(request, grid, self._knowledge)
        if isinstance(together, Refusal):
            return together
        later = find_single_cluster_later(request, grid, self._knowledge)
        if later is None:
            return self._placement_for(together[0], (*together,), "no cluster could hold it alone")
        is_coallocated, reason = self._decide_coallocation(together[0], later)
        if is_coallocated:
            return self._placement_for(together[0], (*together, later), reason)
        return Refusal(f"waits for {self._awaited_nodes(request, later)}: {reason}", RefusalKind.ADVICE)

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if isinstance(request, FixedRequest):
            return FIXED.explain(request, grid)
        if isinstance(self.place(request, grid), Placement):
            return ()
        return tuple(self._explain_cluster(request, c, grid) for c in sorted(grid, key=lambda c: c.name))

    def _explain_cluster(self, request: Choosing, cluster: ClusterView, grid: GridView) -> ClusterReason:
        """Return why the job cannot start with the cluster's idle nodes, and how many more it needs."""

        def fits(idle: int) -> bool:
            return isinstance(self.place(request, with_idle(grid, cluster, idle)), Placement)

        later = find_single_cluster_later(request, grid.select_clusters(frozenset([cluster.name])), self._knowledge)
        needs = f"the request needs {request.total_size} in all"
        if isinstance(request, FlexibleRequest) and not cluster.accepts(request.total_size):
            needs = f"{needs}; {describe_sizes(cluster.name, cluster.job_sizes)}"
        if later is not None and later.option.wait is not None:
            needs = f"{needs}, which are expected here at {self._format_expected(later.option.wait)}"
        return reason_for(cluster, needs, idle_that_suffices(cluster, fits))

    # Placements

    def _place_fixed(self, request: FixedRequest, grid: GridView) -> Placement | Refusal:
        """Place a fixed request: there is no choice of clusters, but the advice records the predicted run time."""
        answer = FIXED.place(request, grid)
        if isinstance(answer, Refusal):
            return answer
        names = tuple(sorted({component.cluster for component in answer.components}))
        run, slowdown = self._knowledge.run_time(names), self._knowledge.slowdown(names)
        speed = min(cluster.speed for name in names if (cluster := grid.get(name)) is not None)
        option = Option(names, slowdown, 0.0, 0.0, None if run is None else run / speed)
        return replace(answer, advice=Advice(self._knowledge.application, (option,), 0))

    def _alone_or_faster(self, alone: Alternative, request: Choosing, grid: GridView) -> Placement:
        """Place the job on one cluster, or on faster clusters together if they are predicted to end it first.

        If the run time is unknown, one cluster is used.
        """
        if alone.option.run is None:
            return self._placement_for(alone, (alone,))
        faster = list(takewhile(lambda cluster: cluster.speed > alone.speed, grid.by_speed))
        if sum(cluster.idle for cluster in faster) < request.total_size:
            return self._placement_for(alone, (alone,))
        together = find_multi_cluster_now(
            request, grid.select_clusters(frozenset(cluster.name for cluster in faster)), self._knowledge
        )
        if isinstance(together, Refusal) or together[0].cost >= alone.cost:
            return self._placement_for(alone, (alone,))
        chosen = together[0]
        if self._knowledge.loaded and self._harmless_probability(chosen) < SURE:
            return self._placement_for(alone, (alone,))
        reason = (
            f"faster than {alone.option.clusters[0]} alone, even with a slowdown of {self._describe_slowdown(chosen)}"
        )
        return self._placement_for(chosen, (*together, alone), reason)

    def _placement_for(
        self, chosen: Alternative, alternatives: tuple[Alternative, ...], decision: str = ""
    ) -> Placement:
        """Return the placement of the chosen alternative; its advice records all alternatives.

        The reason for users includes ``decision``, which says why this alternative was chosen.
        """
        assert chosen.placement is not None
        options = tuple(alternative.option for alternative in alternatives)
        reason = "; ".join(filter(None, (chosen.placement.reason, decision, self._describe_prediction(chosen))))
        advice = Advice(self._knowledge.application, options, alternatives.index(chosen))
        return replace(chosen.placement, reason=reason, advice=advice)

    # Decisions

    def _decide_coallocation(self, together: Alternative, later: Alternative) -> tuple[bool, str]:
        """Return whether to co-allocate now instead of waiting for one cluster, and the reason for users."""
        now, then, slowdown = together.option.response, later.option.response, together.option.slowdown
        slowdown_text = (
            f"a slowdown of {self._describe_slowdown(together)} on {len(together.option.clusters)} clusters now"
        )
        harmless = self._harmless_probability(together)
        verb = "is" if harmless <= HOPELESS else "may be"
        run = together.option.run
        # The blocking job ends at an unknown time, and has already run longer than this job would.
        is_blocked = later.option.wait is None and run is not None and later.blocked >= run
        unknown = f"{slowdown_text} is not known well enough, and this is to find out"
        if self._knowledge.loaded and harmless < SURE and not is_blocked:
            if self._may_probe(harmless):
                return True, unknown
            return False, f"{slowdown_text} {verb} too much while others wait"
        if self._knowledge.waited >= _max_wait(together):
            waited = f"it has waited {_format_seconds(self._knowledge.waited)} with room on several clusters"
            return True, f"{waited}, and prefers to for no more than {_format_seconds(_max_wait(together))}"
        if now is not None and then is not None:
            expected = self._format_expected(later.option.wait or 0.0)
            on_one = f"{_format_seconds(then)} in {later.option.clusters[0]} from {expected}"
            return now <= then, f"predicted are {_format_seconds(now)} with {slowdown_text}, {on_one}"
        if is_blocked:
            return True, f"what is in the way in {later.option.clusters[0]} has run for longer than this would"
        if harmless < SURE:
            probes = self._may_probe(harmless)
            return probes, unknown if probes else f"{slowdown_text} {verb} more than {PAYS_UP_TO:g}"
        if slowdown <= PAYS_UP_TO + ROUNDING:
            return True, f"{slowdown_text} is no more than {PAYS_UP_TO:g}"
        return False, f"{slowdown_text} is more than {PAYS_UP_TO:g}"

    def _harmless_probability(self, alternative: Alternative) -> float:
        """Return the probability that the slowdown stays below the one that harms other jobs."""
        return self._knowledge.slowdowns.harmless_probability(alternative.option.clusters)

    def _may_probe(self, harmless: float) -> bool:
        return self._knowledge.probing is not None and self._knowledge.probing(harmless)

    # Texts for users

    def _awaited_nodes(self, request: Choosing, later: Alternative) -> str:
        """Return the nodes for which the job waits as text, with the expected time if it is known."""
        wait, cluster = later.option.wait, later.option.clusters[0]
        if wait is None:
            return f"{format_nodes(request.total_size)} in one cluster, such as {cluster}"
        return f"{format_nodes(request.total_size)} in {cluster}, expected at {self._format_expected(wait)}"

    def _format_expected(self, wait: float) -> str:
        return format_time(self._knowledge.now + wait, self._knowledge.now, exact=True)

    def _describe_slowdown(self, alternative: Alternative) -> str:
        """Return a text such as ``1.20 (1.05 to 1.40, from 3 runs)``: the estimate, its 80 % interval, its source."""
        slowdowns = self._knowledge.slowdowns
        estimate = slowdowns.on_clusters(alternative.option.clusters)
        if slowdowns.runs:
            killed = f", {slowdowns.killed} of them killed" if slowdowns.killed else ""
            source = f"from {slowdowns.runs} run{'s' if slowdowns.runs > 1 else ''}{killed}"
        else:
            source = "assumed" if self._knowledge.communication is None else "as declared"
        bounds = f"{max(1.0, estimate.low):.2f} to {max(1.0, estimate.high):.2f}"
        return f"{alternative.option.slowdown:.2f} ({bounds}, {source})"

    def _describe_prediction(self, alternative: Alternative) -> str:
        """Return the predicted run time and transfer time as text; empty if the run time is unknown."""
        option = alternative.option
        if option.run is None:
            return ""
        transfers = f" after {_format_seconds(option.transfer)} of transfers" if option.transfer else ""
        return f"predicted to run {_format_seconds(option.run)}{transfers}"


def _max_wait(together: Alternative) -> float:
    """Return the maximum seconds for which a job prefers to wait: its run time on several clusters."""
    return MAX_WAIT if together.option.run is None else together.option.run


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
