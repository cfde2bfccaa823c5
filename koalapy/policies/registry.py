"""A registry of placement policies by name."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast, get_args

from koalapy.model.errors import UsageError
from koalapy.model.request import Environment, Request, RequestType
from koalapy.model.wording import suggest_names
from koalapy.policies.adaptive import Adaptive
from koalapy.policies.auto import Auto
from koalapy.policies.close_to_files import CloseToFiles
from koalapy.policies.communication_aware import CommunicationAware
from koalapy.policies.fixed import Fixed
from koalapy.policies.flexible import ClusterMinimization, FasterFirst, LargerFirst
from koalapy.policies.policy import Capabilities, Policy
from koalapy.policies.resource_matching import ResourceMatching
from koalapy.policies.single import BestFit, FastestOne
from koalapy.policies.worst_fit import WorstFit

DEFAULTS: dict[RequestType, str] = {
    "fixed": Fixed.name,
    "nonfixed": WorstFit.name,
    "flexible": ClusterMinimization.name,
}
"""Default policy of each request type."""

T = TypeVar("T")

REQUEST_TYPES: frozenset[str] = frozenset(get_args(RequestType))
UNDECLARED = Capabilities()

MAX_RETAINED_CONFIGURED = 1000
"""Maximum number of configured policies in the cache."""


class Registry:
    """The placement policies of a daemon."""

    def __init__(self) -> None:
        self._policies: dict[str, Policy] = {}
        self._configured: dict[tuple[str, Environment], Policy] = {}
        self._capabilities: dict[str, Capabilities] = {}

    def register(self, policy: object) -> None:
        """Add a policy. Raise ``UsageError`` if the object is not a policy or its name is in use."""
        problem = _find_problem(policy)
        if problem:
            raise UsageError(
                f"{policy!r} is not a placement policy: {problem}",
                field="policy",
                hint="implement the protocol koalapy.policies.policy.Policy",
            )
        checked = cast(Policy, policy)
        if checked.name in self._policies:
            raise UsageError(
                f"there is a policy named {checked.name} already",
                field="policy",
                value=checked.name,
                hint="give the new one another name",
            )
        self._policies[checked.name] = checked
        self._capabilities[checked.name] = Capabilities.from_policy(checked)

    def names(self) -> list[str]:
        return sorted(self._policies)

    def capabilities(self, name: str) -> Capabilities:
        """Return the capabilities of a policy; the defaults if there is no such policy."""
        return self._capabilities.get(name, UNDECLARED)

    def fits_empty_grid(self, name: str, sizes: Sequence[int], totals: Sequence[int]) -> bool:
        """Return whether components of these sizes may fit on empty clusters of these totals; True if unknown."""
        fits = self.capabilities(name).fits_empty_grid
        return fits is None or _call_policy(name, "request", lambda: fits(sizes, totals))

    def get(self, name: str) -> Policy:
        """Return the policy of that name. Raise ``UsageError`` with the nearest name if there is none."""
        policy = self._policies.get(name)
        if policy is None:
            hint = suggest_names(name, self._policies)
            raise UsageError(f"there is no policy {name}", field="policy", value=name, hint=hint)
        return policy

    def resolve(self, name: str, request: Request, options: Environment = ()) -> Policy:
        """Return the configured policy for a request; an empty name means the default of the request type.

        Raise ``UsageError`` if the policy does not serve the request or has no such options.
        """
        name = name or DEFAULTS[request.type]
        policy = self._configured.get((name, options)) if options else self._policies.get(name)
        if policy is None:
            policy = self._configure_policy(self.get(name), options)
        if request.type not in policy.serves:
            fitting = [candidate for candidate in self.names() if request.type in self._policies[candidate].serves]
            raise UsageError(
                f"policy {policy.name} does not serve {request.type} requests",
                field="policy",
                value=policy.name,
                hint=f"those that do: {', '.join(fitting) or 'none'}",
            )
        check = getattr(policy, "check", None)
        if check is not None:
            _call_policy(policy.name, "request", lambda: check(request))
        return policy

    def _configure_policy(self, policy: Policy, options: Environment) -> Policy:
        """Return the policy with these options, and cache it.

        Raise ``UsageError`` if the policy has no options or rejects these.
        """
        configure = getattr(policy, "configured", None)
        if configure is None:
            field, value = options[0]
            configurable = [name for name in self.names() if hasattr(self._policies[name], "configured")]
            alternative = f", or choose a policy that has some, such as {configurable[0]}" if configurable else ""
            raise UsageError(
                f"policy {policy.name} has no options",
                field=f"policy_options.{field}",
                value=value,
                hint=f"leave them out{alternative}",
            )
        configured: Policy = _call_policy(policy.name, "policy_options", lambda: configure(dict(options)))
        if len(self._configured) >= MAX_RETAINED_CONFIGURED:
            self._configured.clear()
        self._configured[policy.name, options] = configured
        return configured

    def describe_policies(self) -> list[dict[str, object]]:
        """Return the ``name``, the request types (``serves``) and a one-line ``summary`` of each policy, by name."""
        described: list[dict[str, object]] = []
        for name, policy in sorted(self._policies.items()):
            summary, _, _ = (type(policy).__doc__ or "").strip().partition("\n")
            described.append({"name": name, "serves": sorted(policy.serves), "summary": summary})
        return described


def builtin_policies() -> Registry:
    """Return a registry of the policies that ship with koalapy."""
    registry = Registry()
    for policy in (
        Fixed(),
        WorstFit(),
        CloseToFiles(),
        ClusterMinimization(),
        CommunicationAware(),
        ResourceMatching(),
        LargerFirst(),
        FasterFirst(),
        BestFit(),
        FastestOne(),
        Adaptive(),
        Auto(),
    ):
        registry.register(policy)
    return registry


def _call_policy(name: str, field: str, call: Callable[[], T]) -> T:
    """Call a method of a policy; raise its unexpected errors as ``UsageError``."""
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:
        problem = f"policy {name} is broken: it raised {error!r:.200} for the {field}"
        raise UsageError(problem, field=field, hint="use another policy, or tell its author") from error


def _find_problem(policy: object) -> str:
    """Return the reason why an object is not a policy; empty if it is one."""
    if isinstance(policy, type):
        return "it is a class; register an instance of it"
    name, serves = getattr(policy, "name", None), getattr(policy, "serves", None)
    if not isinstance(name, str) or not name.replace("-", "").isalnum() or name != name.lower():
        return f"its name is {name!r}, not lower-case words joined by hyphens"
    if not isinstance(serves, frozenset) or not serves or not serves <= REQUEST_TYPES:
        return f"its serves is {serves!r}, not a frozenset of some of {', '.join(sorted(REQUEST_TYPES))}"
    lacking = [method for method in ("place", "explain") if not callable(getattr(policy, method, None))]
    if getattr(policy, "learns", False) and not callable(getattr(policy, "informed", None)):
        lacking.append("informed, though it learns")
    return f"it has no method {' and no method '.join(lacking)}" if lacking else ""


def load_policies() -> Registry:
    """Return a registry of the built-in policies and the entry points of group ``koalapy.policies``."""
    from importlib.metadata import entry_points  # here, since it loads sockets and threads, which schedulers do without

    registry = builtin_policies()
    for point in entry_points(group="koalapy.policies"):
        registry.register(point.load()())
    return registry
