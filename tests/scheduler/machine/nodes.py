"""Rules of nodes and resource managers."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from koalapy.model.job import Token
from koalapy.model.reports import StageFault
from tests.scheduler.machine.base import LIVE, Machine, cluster_names, component_at, cycle_counts, indexes
from tests.scheduler.sites import STAGE_SIZE, Site

BOOT = 20.0


class Nodes(Machine):
    """Runners, programs, transfers and failures."""

    def startable(self) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.startable()]

    def disconnected_components(self) -> list[tuple[Site, Token]]:
        """Return the components of disconnected clusters."""
        return [(site, token) for site, token in self.components(*LIVE, "delivering", "ended") if not site.connected]

    @precondition(lambda self: self.startable())
    @rule(pick=indexes)
    def report_claimed(self, pick: int) -> None:
        site, token = component_at(self.startable(), pick)
        site.report_claimed(token)

    @precondition(lambda self: self.components("waiting"))
    @rule(pick=indexes, seconds=st.sampled_from([BOOT, BOOT, 0.0]))
    def boot_nodes(self, pick: int, seconds: float) -> None:
        site, token = component_at(self.components("waiting"), pick)
        site.boot_component(token, seconds)

    # Files

    @precondition(lambda self: self.stages())
    @rule(pick=indexes, staged=st.sampled_from([1, 50, STAGE_SIZE]))
    def update_stage(self, pick: int, staged: int) -> None:
        site, token = component_at(self.stages(), pick)
        site.update_stage(token, staged)

    @precondition(lambda self: self.stages())
    @rule(pick=indexes, fault=st.sampled_from(["site", "source", "file"]), rounds=cycle_counts)
    def fail_transfer(self, pick: int, fault: StageFault, rounds: int) -> None:
        site, token = component_at(self.stages(), pick)
        site.update_stage(token, 10, "broken pipe", fault, "file")
        self.run_usual_steps(rounds)

    @precondition(lambda self: [(s, t) for s, t in self.stages() if not s.connected])
    @rule(pick=indexes)
    def lose_stage(self, pick: int) -> None:
        """Lose a stage while the agent is disconnected."""
        site, token = component_at([(s, t) for s, t in self.stages() if not s.connected], pick)
        del site.stages[token]

    # Programs

    @precondition(lambda self: self.components("running"))
    @rule(pick=indexes, code=st.sampled_from([0, 0, 0, 137]))
    def exit_program(self, pick: int, code: int) -> None:
        site, token = component_at(self.components("running"), pick)
        if site.runners[token].exit_code is None:
            site.exit_program(token, code)

    @precondition(lambda self: any(site.graces for site in self.world.sites.values()))
    @rule()
    def end_graces(self) -> None:
        """End all warned programs."""
        for site in self.world.sites.values():
            graces, site.graces = site.graces, []
            for token, _ in graces:
                site.end_grace(token)

    @rule(name=cluster_names, knows=st.booleans())
    def set_warning_support(self, name: str, knows: bool) -> None:
        """Switch between an agent that supports warnings and an older one."""
        self.world.sites[name].supports_warnings = knows

    @precondition(lambda self: self.components("running"))
    @rule(rounds=cycle_counts)
    def end_all_programs(self, rounds: int) -> None:
        """End all programs and deliver all output."""
        for site, token in self.components("running"):
            if site.runners[token].exit_code is None:
                site.exit_program(token, 0)
            site.end_component(token)
        self.run_usual_steps(1)
        for site, token in self.components("delivering"):
            site.finish_delivery(token)
        self.run_usual_steps(rounds)

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=indexes, rounds=cycle_counts)
    def fail_component(self, pick: int, rounds: int) -> None:
        site, token = component_at(self.components(*LIVE), pick)
        site.fail_component(token, "node lost")
        self.run_usual_steps(rounds)

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=indexes)
    def end_component(self, pick: int) -> None:
        site, token = component_at(self.components(*LIVE), pick)
        site.end_component(token)

    @precondition(lambda self: self.components("delivering"))
    @rule(pick=indexes)
    def finish_delivery(self, pick: int) -> None:
        site, token = component_at(self.components("delivering"), pick)
        site.finish_delivery(token)

    @precondition(lambda self: self.disconnected_components())
    @rule(pick=indexes)
    def lose_component(self, pick: int) -> None:
        """Lose a component while its agent is disconnected; a connected agent would report it."""
        site, token = component_at(self.disconnected_components(), pick)
        site.lose_component(token)

    # Resource managers

    @rule(
        name=cluster_names,
        size=st.integers(1, 4),
        fault=st.sampled_from(["job", "limit", "site", "unknown", "unsuitable"]),
    )
    def reject_submissions(self, name: str, size: int, fault: str) -> None:
        """Reject all components of at least this size until reset."""
        self.world.sites[name].rejection_fault = lambda requested_size: fault if requested_size >= size else ""

    @rule(name=cluster_names)
    def accept_submissions(self, name: str) -> None:
        self.world.sites[name].rejection_fault = lambda requested_size: ""

    @rule(name=cluster_names)
    def toggle_black_hole(self, name: str) -> None:
        """Toggle whether a cluster reports idle nodes but starts no component."""
        site = self.world.sites[name]
        if site.is_black_hole:
            site.end_black_hole()
        else:
            site.is_black_hole = True

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=indexes)
    def hold_nodes_of_stopped_component(self, pick: int) -> None:
        """Let a component keep its nodes after it is stopped."""
        site, token = component_at(self.components(*LIVE), pick)
        site.stuck_components.add(token)

    @rule(name=cluster_names)
    def release_stuck_nodes(self, name: str) -> None:
        self.world.sites[name].release_stuck_nodes()

    @rule(name=cluster_names, count=st.integers(1, 4))
    def break_nodes(self, name: str, count: int) -> None:
        self.world.sites[name].break_nodes(count)

    @rule(name=cluster_names)
    def repair_nodes(self, name: str) -> None:
        self.world.sites[name].repair_nodes()

    @rule(name=cluster_names, problem=st.sampled_from(["its resource manager does not answer", "", ""]))
    def set_problem(self, name: str, problem: str) -> None:
        self.world.sites[name].set_problem(problem)

    @rule(name=cluster_names, lacks=st.sampled_from([("rsync",), (), ()]))
    def set_missing_programs(self, name: str, lacks: tuple[str, ...]) -> None:
        self.world.sites[name].set_missing_programs(*lacks)
