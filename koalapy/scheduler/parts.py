"""The parts of a scheduler, which decide about jobs, attempts and clusters."""

from koalapy.scheduler.advisor.knowledge import KnowledgeBuilder
from koalapy.scheduler.arrays import Arrays
from koalapy.scheduler.attempts.attempts import Attempts
from koalapy.scheduler.attempts.components import Components
from koalapy.scheduler.attempts.contact import Confirmations, Contact
from koalapy.scheduler.attempts.drains import Drains
from koalapy.scheduler.attempts.failures import Failures
from koalapy.scheduler.attempts.health import ClusterHealth
from koalapy.scheduler.attempts.link_paths import LinkPaths
from koalapy.scheduler.claims.claim import Claiming, Nonces
from koalapy.scheduler.claims.staging import Transfers
from koalapy.scheduler.queue.candidates import Budget, Candidates, Clock, Offers, WaitingReasons
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.scheduler.queue.questions import PolicyQuestions
from koalapy.scheduler.queue.start_conditions import StartConditions
from koalapy.scheduler.state import SchedulerState


class Parts:
    """The parts of one scheduler. Each is built once, for all that use it."""

    def __init__(self, state: SchedulerState, nonces: Nonces, clock: Clock | None) -> None:
        self.state = state
        profiles = {cluster.name: cluster.profile for cluster in state.grid.clusters()}
        eligibility = Eligibility(profiles, state.accounts, state.sharing)
        self.queues = queues = PlacementQueues(state, eligibility)
        self.knowledge = knowledge = KnowledgeBuilder(state, queues)
        self.questions = questions = PolicyQuestions(state, eligibility, queues, knowledge)
        self.health = health = ClusterHealth(state)
        self.link_paths = link_paths = LinkPaths(state)
        self.attempts = attempts = Attempts(state, health, queues)
        self.arrays = arrays = Arrays(state, attempts, queues)
        self.conditions = StartConditions(state, queues, arrays.give_up)
        self.claiming = claiming = Claiming(state, attempts, queues, eligibility, questions, nonces)
        self.failures = failures = Failures(state, attempts, claiming, health, queues, questions, arrays, link_paths)
        self.transfers = Transfers(state, attempts, claiming, failures)
        self.components = components = Components(state, attempts, failures, health, link_paths)
        self.confirmations = confirmations = Confirmations(state)
        self.contact = Contact(state, confirmations, components, health)
        self.drains = Drains(state, attempts)
        self.offers = offers = Offers(state, queues.plan, queues.kept)
        self.reasons = reasons = WaitingReasons(state, queues, questions)
        self.budget = budget = Budget(state.rules.step_budget, clock)
        self.candidates = Candidates(state, queues, offers, questions, reasons, budget, arrays.give_up)
