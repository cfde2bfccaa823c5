"""What happens on nodes, and in the resource managers that give them away."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from koalapy.model.job import Token
from koalapy.model.reports import StageFault
from tests.scheduler.machine.base import LIVE, Machine, names, pick_of, picks, rounds
from tests.scheduler.sites import STAGE_SIZE, Site

BOOT = 20.0


class Nodes(Machine):
    """Runners, programs, files on their way, and what breaks."""

    def startable(self) -> list[tuple[Site, Token]]:
        return [(site, token) for site in self.world.sites.values() for token in site.startable()]

    def unseen(self) -> list[tuple[Site, Token]]:
        """Components of sites whose agent is away."""
        return [(site, token) for site, token in self.components(*LIVE, "delivering", "ended") if not site.connected]

    @precondition(lambda self: self.startable())
    @rule(pick=picks)
    def report_claimed(self, pick: int) -> None:
        site, token = pick_of(self.startable(), pick)
        site.report_claimed(token)

    @precondition(lambda self: self.components("waiting"))
    @rule(pick=picks, seconds=st.sampled_from([BOOT, BOOT, 0.0]))
    def nodes_boot(self, pick: int, seconds: float) -> None:
        site, token = pick_of(self.components("waiting"), pick)
        site.boot_component(token, seconds)

    # Files

    @precondition(lambda self: self.stages())
    @rule(pick=picks, staged=st.sampled_from([1, 50, STAGE_SIZE]))
    def files_arrive(self, pick: int, staged: int) -> None:
        site, token = pick_of(self.stages(), pick)
        site.update_stage(token, staged)

    @precondition(lambda self: self.stages())
    @rule(pick=picks, fault=st.sampled_from(["site", "source", "file"]), rounds=rounds)
    def transfer_fails(self, pick: int, fault: StageFault, rounds: int) -> None:
        site, token = pick_of(self.stages(), pick)
        site.update_stage(token, 10, "broken pipe", fault, "file")
        self.run_usual_steps(rounds)

    @precondition(lambda self: [(s, t) for s, t in self.stages() if not s.connected])
    @rule(pick=picks)
    def files_vanish(self, pick: int) -> None:
        """An agent comes back and knows nothing of them."""
        site, token = pick_of([(s, t) for s, t in self.stages() if not s.connected], pick)
        del site.stages[token]

    # Programs

    @precondition(lambda self: self.components("running"))
    @rule(pick=picks, code=st.sampled_from([0, 0, 0, 137]))
    def exit_program(self, pick: int, code: int) -> None:
        site, token = pick_of(self.components("running"), pick)
        if site.runners[token].exit_code is None:
            site.exit_program(token, code)

    @precondition(lambda self: any(site.graces for site in self.world.sites.values()))
    @rule()
    def graces_are_over(self) -> None:
        """Of all programs that were warned."""
        for site in self.world.sites.values():
            graces, site.graces = site.graces, []
            for token, _ in graces:
                site.end_grace(token)

    @rule(name=names, knows=st.booleans())
    def agent_knows_of_warnings_or_not(self, name: str, knows: bool) -> None:
        """It may be one of the version before."""
        self.world.sites[name].supports_warnings = knows

    @precondition(lambda self: self.components("running"))
    @rule(rounds=rounds)
    def all_programs_end(self, rounds: int) -> None:
        """And all that was on its way arrives."""
        for site, token in self.components("running"):
            if site.runners[token].exit_code is None:
                site.exit_program(token, 0)
            site.end_component(token)
        self.run_usual_steps(1)
        for site, token in self.components("delivering"):
            site.finish_delivery(token)
        self.run_usual_steps(rounds)

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=picks, rounds=rounds)
    def component_breaks(self, pick: int, rounds: int) -> None:
        site, token = pick_of(self.components(*LIVE), pick)
        site.fail_component(token, "node lost")
        self.run_usual_steps(rounds)

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=picks)
    def component_ends(self, pick: int) -> None:
        site, token = pick_of(self.components(*LIVE), pick)
        site.end_component(token)

    @precondition(lambda self: self.components("delivering"))
    @rule(pick=picks)
    def output_arrives(self, pick: int) -> None:
        site, token = pick_of(self.components("delivering"), pick)
        site.finish_delivery(token)

    @precondition(lambda self: self.unseen())
    @rule(pick=picks)
    def component_vanishes(self, pick: int) -> None:
        """Only while the agent is away: one that is there would tell."""
        site, token = pick_of(self.unseen(), pick)
        site.lose_component(token)

    # Resource managers

    @rule(name=names, size=st.integers(1, 4), fault=st.sampled_from(["job", "limit", "site", "unknown", "unsuitable"]))
    def resource_manager_refuses(self, name: str, size: int, fault: str) -> None:
        """All components of so many nodes or more, until further notice."""
        self.world.sites[name].rejection_fault = lambda asked: fault if asked >= size else ""

    @rule(name=names)
    def resource_manager_takes_all(self, name: str) -> None:
        self.world.sites[name].rejection_fault = lambda asked: ""

    @rule(name=names)
    def black_hole_opens_or_closes(self, name: str) -> None:
        """It says that its nodes are idle, and starts nothing of ours."""
        site = self.world.sites[name]
        if site.is_black_hole:
            site.mend()
        else:
            site.is_black_hole = True

    @precondition(lambda self: self.components(*LIVE))
    @rule(pick=picks)
    def nodes_get_stuck(self, pick: int) -> None:
        """What is told to end does not give back its nodes."""
        site, token = pick_of(self.components(*LIVE), pick)
        site.stuck_components.add(token)

    @rule(name=names)
    def stuck_nodes_come_back(self, name: str) -> None:
        self.world.sites[name].release_stuck_nodes()

    @rule(name=names, count=st.integers(1, 4))
    def nodes_go_down(self, name: str, count: int) -> None:
        self.world.sites[name].break_nodes(count)

    @rule(name=names)
    def nodes_come_up(self, name: str) -> None:
        self.world.sites[name].repair_nodes()

    @rule(name=names, problem=st.sampled_from(["its resource manager does not answer", "", ""]))
    def resource_manager_has_a_problem(self, name: str, problem: str) -> None:
        self.world.sites[name].set_problem(problem)

    @rule(name=names, lacks=st.sampled_from([("rsync",), (), ()]))
    def host_lacks_programs(self, name: str, lacks: tuple[str, ...]) -> None:
        self.world.sites[name].set_missing_programs(*lacks)
