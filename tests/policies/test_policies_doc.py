"""The page on policies names them all, and its examples are placed as it says."""

import re
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from koalapy.model.cluster import ClusterView, GridView, Link
from koalapy.model.job import JobSpec
from koalapy.model.placement import Placement
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.model.users import Accounts
from koalapy.policies.communication_aware import OPTIONS
from koalapy.policies.matching.exact import Mode
from koalapy.policies.registry import DEFAULTS, builtin_policies
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_calls import PolicyCalls
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import check_submission

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\$ koala submit (.*) -- \./a\.out +# (.*)$", PAGE, re.MULTILINE)
UNITS = {"ms": 1e-3, "us": 1e-6}


def example_grid() -> GridView:
    """As the page's tables say."""
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    links = re.findall(r"between: \[(\w+), (\w+)\], latency: (\d+)(ms|us)", PAGE)
    clusters = tuple(ClusterView(name, int(idle), int(idle), speed=float(speed)) for name, idle, speed in rows)
    return GridView(clusters, {(one, other): Link(int(value) * UNITS[unit]) for one, other, value, unit in links})


def parsed(words: str) -> Namespace:
    parser = ArgumentParser()
    for option in ("--flexible", "--nonfixed", "--fixed", "--policy", "--coallocation", "--speed-ratio-min"):
        parser.add_argument(option)
    parser.add_argument("--communication")
    parser.add_argument("--per-node-bandwidth")
    for option in ("--split", "--policy-option"):
        parser.add_argument(option, action="append", default=[])
    return parser.parse_args(shlex.split(words))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def request_of(given: Namespace) -> Request:
    if given.flexible:
        return FlexibleRequest(int(given.flexible), split_options=tuple(tuple(numbers(way)) for way in given.split))
    if given.nonfixed:
        return NonFixedRequest(tuple(ComponentRequest(size) for size in numbers(given.nonfixed)))
    named = (component.split(":") for component in given.fixed.split(","))
    return FixedRequest(tuple(ComponentRequest(int(size), name) for name, size in named))


def spec_of(given: Namespace) -> JobSpec:
    at_most = {None: None, "never": 1}.get(given.coallocation, given.coallocation)
    return JobSpec(
        request_of(given),
        ("./a.out",),
        policy=given.policy or "",
        policy_options=tuple(tuple(option.split("=")) for option in given.policy_option),
        coallocation=None if at_most is None else int(at_most),
        speed_ratio_min=None if given.speed_ratio_min is None else float(given.speed_ratio_min),
    )


@pytest.mark.parametrize(("words", "expected"), EXAMPLES)
def test_an_example_is_placed_as_the_page_says(words: str, expected: str) -> None:
    view, spec = example_grid(), spec_of(parsed(words))
    check_submission(spec, Limits([ClusterLimits(c.name, c.total, speed=c.speed) for c in view], builtin_policies()))
    eligibility = Eligibility({cluster.name: ClusterProfile() for cluster in view}, Accounts())
    policy = builtin_policies().resolve(spec.policy, spec.request, spec.policy_options)
    answer = PolicyCalls(eligibility).evaluate(policy, spec, view)
    if expected == "waits":
        assert not isinstance(answer, Placement)
        return
    assert isinstance(answer, Placement)
    names = dict.fromkeys(component.cluster for component in answer.components)
    assert ", ".join(f"{name} {answer.nodes_on(name)}" for name in names) == expected


def test_the_page_names_every_policy_with_an_example_and_every_option() -> None:
    used = {spec_of(parsed(words)).policy for words, _ in EXAMPLES}
    for policy in builtin_policies().describe_policies():
        assert f"\n| `{policy['name']}` | " in PAGE
        assert policy["name"] in used | set(DEFAULTS.values())
    for option in OPTIONS:
        assert f"\n| `{option}` | " in PAGE
    for mode in Mode:
        assert f"`{mode}`" in PAGE
