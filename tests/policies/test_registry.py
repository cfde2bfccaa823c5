"""Policies by name, including one of another package."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.policies.policy import Capabilities, Policy
from koalapy.policies.registry import Registry, builtin_policies
from tests.policies.grids import fixed, grid, nonfixed, sites


class Alphabetical:
    """Everything on the first cluster by name.

    Not a good policy.
    """

    name = "alphabetical"
    serves: frozenset[RequestType] = frozenset({"nonfixed", "flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        first = min(cluster.name for cluster in grid)
        return Placement((PlacedComponent(request.total_size, first),))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return ()


REQUESTS: dict[str, Request] = {"fixed": fixed((1, "north")), "nonfixed": nonfixed(1), "flexible": FlexibleRequest(1)}


@pytest.mark.parametrize(
    ("kind", "name"), [("fixed", "fixed"), ("nonfixed", "worst-fit"), ("flexible", "cluster-minimization")]
)
def test_registry_has_a_default_for_each_request_type(kind: str, name: str) -> None:
    assert builtin_policies().resolve("", REQUESTS[kind]).name == name
    assert builtin_policies().resolve(name, REQUESTS[kind]).name == name


def test_registry_resolves_external_policy() -> None:
    registry = builtin_policies()
    registry.register(Alphabetical())
    policy = registry.resolve("alphabetical", FlexibleRequest(3))
    assert sites(policy.place(FlexibleRequest(3), grid(north=3, south=9))) == [(3, "north")]
    assert registry.resolve("", FlexibleRequest(3)).name == "cluster-minimization"
    with pytest.raises(UsageError) as refused:
        registry.resolve("alphabetical", fixed((1, "north")))
    assert (refused.value.field, refused.value.value) == ("policy", "alphabetical")


def test_resolve_of_unserved_request_names_serving_policies() -> None:
    registry = builtin_policies()
    registry.register(Alphabetical())
    with pytest.raises(UsageError) as refused:
        registry.resolve("worst-fit", FlexibleRequest(3))
    assert refused.value.message == "policy worst-fit does not serve flexible requests"
    serving = [name for name in registry.names() if "flexible" in registry.get(name).serves]
    assert {"alphabetical", "auto", "cluster-minimization"} <= set(serving)
    assert refused.value.hint == f"those that do: {', '.join(serving)}"


def test_get_of_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UsageError) as refused:
        builtin_policies().get("worstfit")
    error = refused.value
    assert (error.message, error.field, error.value) == ("there is no policy worstfit", "policy", "worstfit")
    names = ", ".join(builtin_policies().names())
    assert error.hint == f"did you mean worst-fit? known: {names}"
    with pytest.raises(UsageError) as refused:
        builtin_policies().get("zzz")
    assert refused.value.hint == f"known: {names}"


def test_register_of_used_name_is_rejected() -> None:
    registry = builtin_policies()
    with pytest.raises(UsageError, match="there is a policy named fixed already"):
        registry.register(registry.get("fixed"))


class Together(Alphabetical):
    """A policy that declares capabilities."""

    name = "together"
    combines_clusters = False
    keeps_together = True

    def fits_empty_grid(self, sizes: Sequence[int], idle: Sequence[int]) -> bool:
        return sum(sizes) <= min(idle) if 0 not in sizes else 1 // 0 == 1


def test_capabilities_are_those_that_the_policy_declares() -> None:
    registry = builtin_policies()
    registry.register(Alphabetical())
    registry.register(Together())
    assert registry.capabilities("alphabetical") == registry.capabilities("unknown") == Capabilities()
    declared = registry.capabilities("together")
    assert (declared.combines_clusters, declared.keeps_together, declared.learns) == (False, True, False)
    assert registry.fits_empty_grid("alphabetical", [9], [1]), "nothing is known of it"
    assert registry.fits_empty_grid("together", [1, 2], [3, 4])
    assert not registry.fits_empty_grid("together", [1, 3], [3, 4])
    with pytest.raises(UsageError, match="policy together is broken: it raised ZeroDivisionError"):
        registry.fits_empty_grid("together", [0], [1])


class Weighted(Alphabetical):
    """With an option."""

    name = "weighted"

    def __init__(self, weight: str = "1") -> None:
        self.weight = weight

    def configured(self, options: Mapping[str, str]) -> Policy:
        if options.keys() - {"weight"}:
            raise UsageError("no such option", field=f"policy_options.{min(options)}")
        return Weighted(str(1 / float(options["weight"])))


def test_resolve_configures_policy_once_per_options() -> None:
    registry = builtin_policies()
    registry.register(Weighted())
    request = FlexibleRequest(1)
    half, same = (registry.resolve("weighted", request, (("weight", "2"),)) for _ in range(2))
    assert isinstance(half, Weighted)
    assert half.weight == "0.5"
    assert half is same
    assert registry.resolve("weighted", request) is registry.get("weighted")
    with pytest.raises(UsageError) as refused:
        registry.resolve("weighted", request, (("wait", "2"),))
    assert refused.value.field == "policy_options.wait"


def test_resolve_with_options_of_policy_without_any_is_rejected() -> None:
    with pytest.raises(UsageError) as refused:
        builtin_policies().resolve("", FlexibleRequest(1), (("metric", "latency"),))
    assert (refused.value.field, refused.value.value) == ("policy_options.metric", "latency")
    assert refused.value.message == "policy cluster-minimization has no options"


def test_resolve_of_policy_that_fails_on_options_is_rejected() -> None:
    registry = builtin_policies()
    registry.register(Weighted())
    with pytest.raises(UsageError) as refused:
        registry.resolve("weighted", FlexibleRequest(1), (("weight", "0"),))
    assert refused.value.message == (
        "policy weighted is broken: it raised ZeroDivisionError('float division by zero') for the policy_options"
    )


def _like_a_policy(**changes: object) -> SimpleNamespace:
    good: dict[str, object] = {"name": "mine", "serves": frozenset({"fixed"}), "place": len, "explain": len}
    return SimpleNamespace(**(good | changes))


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Alphabetical, "it is a class; register an instance of it"),
        (object(), "its name is None, not lower-case words joined by hyphens"),
        (_like_a_policy(name=""), "its name is '', not"),
        (_like_a_policy(name="My policy"), "its name is 'My policy', not"),
        (_like_a_policy(serves={"fixed"}), "its serves is {'fixed'}, not a frozenset of some of fixed, flexible, non"),
        (_like_a_policy(serves=frozenset()), "its serves is frozenset(), not"),
        (_like_a_policy(serves=frozenset({"all"})), "its serves is frozenset({'all'}), not"),
        (_like_a_policy(explain=None), "it has no method explain"),
        (_like_a_policy(learns=True), "it has no method informed, though it learns"),
        (_like_a_policy(place="here", explain=None), "it has no method place and no method explain"),
    ],
)
def test_register_of_invalid_policy_names_what_is_missing(policy: object, problem: str) -> None:
    registry = Registry()
    with pytest.raises(UsageError) as refused:
        registry.register(policy)
    assert f"is not a placement policy: {problem}" in refused.value.message
    assert refused.value.field == "policy"
    assert registry.names() == []


def test_describe_policies_has_a_summary_of_each() -> None:
    registry = builtin_policies()
    registry.register(Alphabetical())
    described = registry.describe_policies()
    assert [policy["name"] for policy in described] == registry.names()
    assert described[1] == {
        "name": "alphabetical",
        "serves": ["flexible", "nonfixed"],
        "summary": "Everything on the first cluster by name.",
    }
    assert all(policy["summary"] for policy in described)


@pytest.mark.parametrize("name", builtin_policies().names())
def test_policies_reject_requests_that_they_do_not_serve(name: str) -> None:
    policy = builtin_policies().get(name)
    assert isinstance(policy, Policy)
    for kind, request in REQUESTS.items():
        if kind not in policy.serves:
            for method in (policy.place, policy.explain):
                with pytest.raises(TypeError, match=f"{name} does not serve {kind} requests"):
                    method(request, grid(north=1))
