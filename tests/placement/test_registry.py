"""Policies by name, with one that a third party brings."""

from types import SimpleNamespace

import pytest

from koalapy.model.cluster import GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.placement.policy import Policy
from koalapy.placement.registry import Registry, builtin
from tests.placement.grids import fixed, grid, nonfixed, sites


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


REQUESTS: dict[str, Request] = {
    "fixed": fixed((1, "north")),
    "nonfixed": nonfixed(1),
    "flexible": FlexibleRequest(1),
}


@pytest.mark.parametrize(
    ("kind", "name"), [("fixed", "fixed"), ("nonfixed", "worst-fit"), ("flexible", "cluster-minimization")]
)
def test_every_type_of_request_has_a_default(kind: str, name: str) -> None:
    assert builtin().resolve("", REQUESTS[kind]).name == name
    assert builtin().resolve(name, REQUESTS[kind]).name == name


def test_a_third_party_policy_is_one_like_any_other() -> None:
    registry = builtin()
    registry.register(Alphabetical())
    policy = registry.resolve("alphabetical", FlexibleRequest(3))
    assert sites(policy.place(FlexibleRequest(3), grid(north=3, south=9))) == [(3, "north")]
    assert registry.resolve("", FlexibleRequest(3)).name == "cluster-minimization"
    with pytest.raises(UsageError) as refused:
        registry.resolve("alphabetical", fixed((1, "north")))
    assert (refused.value.field, refused.value.value) == ("policy", "alphabetical")


def test_a_policy_that_does_not_serve_the_request_is_refused_with_those_that_do() -> None:
    registry = builtin()
    registry.register(Alphabetical())
    with pytest.raises(UsageError) as refused:
        registry.resolve("worst-fit", FlexibleRequest(3))
    assert refused.value.message == "policy worst-fit does not serve flexible requests"
    assert refused.value.hint == "those that do: alphabetical, cluster-minimization"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as refused:
        builtin().get("worstfit")
    error = refused.value
    assert (error.message, error.field, error.value) == ("there is no policy worstfit", "policy", "worstfit")
    assert error.hint == "did you mean worst-fit? known: cluster-minimization, fixed, worst-fit"
    with pytest.raises(UsageError) as refused:
        builtin().get("zzz")
    assert refused.value.hint == "known: cluster-minimization, fixed, worst-fit"


def test_a_name_is_taken_once() -> None:
    registry = builtin()
    with pytest.raises(UsageError, match="there is a policy named fixed already"):
        registry.register(registry.get("fixed"))


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
        (_like_a_policy(place="here", explain=None), "it has no method place and no method explain"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_it_lacks(policy: object, problem: str) -> None:
    registry = Registry()
    with pytest.raises(UsageError) as refused:
        registry.register(policy)
    assert f"is no placement policy: {problem}" in refused.value.message
    assert refused.value.field == "policy"
    assert registry.names() == []


def test_describes_its_policies_for_users() -> None:
    registry = builtin()
    registry.register(Alphabetical())
    described = registry.describe()
    assert [policy["name"] for policy in described] == registry.names()
    assert described[0] == {
        "name": "alphabetical",
        "serves": ["flexible", "nonfixed"],
        "summary": "Everything on the first cluster by name.",
    }
    assert all(policy["summary"] for policy in described)


@pytest.mark.parametrize("name", builtin().names())
def test_policies_refuse_the_requests_they_do_not_serve(name: str) -> None:
    policy = builtin().get(name)
    assert isinstance(policy, Policy)
    for kind, request in REQUESTS.items():
        if kind not in policy.serves:
            for method in (policy.place, policy.explain):
                with pytest.raises(TypeError, match=f"{name} does not serve {kind} requests"):
                    method(request, grid(north=1))
