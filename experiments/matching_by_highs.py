"""Match a job with nodes by mixed-integer programming (lerida-2008 3), with HiGHS instead of the paper's CPLEX.

Tests and experiments compare the exact algorithm with it. The demand on an uplink is not linear in the number of nodes,
so there is a binary variable for each number of nodes that a site may give.
"""

from typing import Any

from koalapy.policies.matching import Kind, Matching, Mode, Problem, Share, Site

MAX_SLOWDOWN = 1e12
"""Upper bound of slowdowns."""


def match_by_highs(problem: Problem, mode: Mode = Mode.OPTIMAL) -> Matching | None:
    """Return the best matching by HiGHS (``koalapy[experiments]``), or None if there is none.

    With kinds of one node each it is the paper's model, which has a variable for each node.
    """
    return _Model(problem, mode).solve()


class _Model:
    def __init__(self, problem: Problem, mode: Mode) -> None:
        import highspy  # an optional dependency

        solver: Any = highspy
        self._problem = problem
        self._highs = solver.Highs()
        self._optimal, self._infeasible = solver.HighsModelStatus.kOptimal, solver.HighsModelStatus.kInfeasible
        for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-9)):
            self._highs.setOptionValue(option, value)
        self._is_optimised = mode is not Mode.FIRST_NON_SATURATED
        slowest = max((kind.slowdown for site in problem.sites for kind in site.kinds), default=1.0)
        self._processing = self._highs.addVariable(lb=0.0, ub=slowest)
        most_loaded = 1.0 if mode is not Mode.OPTIMAL else MAX_SLOWDOWN
        self._communication = self._highs.addVariable(lb=1.0, ub=most_loaded)
        self._nodes: list[tuple[Site, Kind, Any]] = []
        self._used: list[Any] = []
        for site in problem.sites:
            self._add_site(site)

    def _add_site(self, site: Site) -> None:
        highs, problem = self._highs, self._problem
        node_counts = []
        for kind in site.kinds:
            nodes = highs.addIntegral(lb=0, ub=min(kind.idle, problem.nodes))
            used = highs.addBinary()
            highs.addConstr(nodes <= min(kind.idle, problem.nodes) * used)
            highs.addConstr(self._processing >= kind.slowdown * used)
            self._nodes.append((site, kind, nodes))
            node_counts.append(nodes)
        counts, loads, sizes = [], [], []
        for count in range(problem.min_nodes_per_site, min(site.idle, problem.nodes) + 1):
            load = problem.link_slowdown(site, count)
            if load <= MAX_SLOWDOWN:
                is_it = highs.addBinary()
                counts.append(is_it)
                sizes.append(count * is_it)
                loads.append(load * is_it)
        if not counts:
            for nodes in node_counts:
                highs.addConstr(nodes <= 0)
            return
        highs.addConstr(sum(counts) <= 1)
        highs.addConstr(sum(node_counts) == sum(sizes))
        highs.addConstr(self._communication >= sum(loads))
        self._used += counts

    def solve(self) -> Matching | None:
        highs, problem = self._highs, self._problem
        if not self._nodes:
            return None
        highs.addConstr(sum(nodes for _, _, nodes in self._nodes) == problem.nodes)
        if problem.max_sites is not None and self._used:
            highs.addConstr(sum(self._used) <= problem.max_sites)
        if self._is_optimised:
            highs.minimize(problem.computing * self._processing + problem.communicating * self._communication)
        else:
            highs.run()
        status = highs.getModelStatus()
        if status == self._infeasible:
            return None
        if status != self._optimal:
            raise RuntimeError(f"HiGHS found no answer: {highs.modelStatusToString(status)}")
        values = [round(highs.val(nodes)) for _, _, nodes in self._nodes]
        assigned = zip(self._nodes, values, strict=True)
        return problem.evaluate_shares(
            Share(site.name, kind.name, count) for (site, kind, _), count in assigned if count
        )
