"""The documentation of policies, which lists them all and has correct examples."""

import re
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from koalapy.model.cluster import ClusterView, GridView, Link
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import Placement
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.model.users import Accounts
from koalapy.policies.communication_aware import OPTIONS
from koalapy.policies.matching import Mode
from koalapy.policies.registry import DEFAULTS, builtin_policies
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import check_submission

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\$ koala submit (.*) -- \./a\.out +# (.*)$", PAGE, re.MULTILINE)
UNITS = {"ms": 1e-3, "us": 1e-6}


def example_grid() -> GridView:
    """Return the grid of the page's tables."""
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    links = re.findall(r"between: \[(\w+), (\w+)\], latency: (\d+)(ms|us)", PAGE)
    clusters = tuple(ClusterView(name, int(idle), int(idle), speed=float(speed)) for name, idle, speed in rows)
    return GridView(clusters, {(first, second): Link(int(value) * UNITS[unit]) for first, second, value, unit in links})


def parse_options(command: str) -> Namespace:
    parser = ArgumentParser()
    for option in ("--flexible", "--nonfixed", "--fixed", "--policy", "--coallocation", "--speed-ratio-min"):
        parser.add_argument(option)
    parser.add_argument("--communication")
    parser.add_argument("--per-node-bandwidth")
    for option in ("--split", "--policy-option"):
        parser.add_argument(option, action="append", default=[])
    return parser.parse_args(shlex.split(command))


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def request_of(options: Namespace) -> Request:
    if options.flexible:
        return FlexibleRequest(
            int(options.flexible), split_options=tuple(tuple(parse_numbers(sizes)) for sizes in options.split)
        )
    if options.nonfixed:
        return NonFixedRequest(tuple(ComponentRequest(size) for size in parse_numbers(options.nonfixed)))
    components = (component.split(":") for component in options.fixed.split(","))
    return FixedRequest(tuple(ComponentRequest(int(size), name) for name, size in components))


def spec_of(options: Namespace) -> JobSpec:
    at_most = {None: None, "never": 1}.get(options.coallocation, options.coallocation)
    return JobSpec(
        request_of(options),
        ("./a.out",),
        policy=options.policy or "",
        policy_options=tuple(tuple(option.split("=")) for option in options.policy_option),
        coallocation=None if at_most is None else int(at_most),
        speed_ratio_min=None if options.speed_ratio_min is None else float(options.speed_ratio_min),
    )


@pytest.mark.parametrize(("command", "expected"), EXAMPLES)
def test_policies_page_example_is_placed_as_written(command: str, expected: str) -> None:
    view, spec = example_grid(), spec_of(parse_options(command))
    check_submission(spec, Limits([ClusterLimits(c.name, c.total, speed=c.speed) for c in view], builtin_policies()))
    eligibility = Eligibility({cluster.name: ClusterProfile() for cluster in view}, Accounts())
    policy = builtin_policies().resolve(spec.policy, spec.request, spec.policy_options)
    answer = PolicyQuestion(policy, spec, eligibility).place(view)
    if expected == "waits":
        assert not isinstance(answer, Placement)
        return
    assert isinstance(answer, Placement)
    names = dict.fromkeys(component.cluster for component in answer.components)
    assert ", ".join(f"{name} {answer.nodes_on(name)}" for name in names) == expected


def test_policies_page_has_every_policy_and_option() -> None:
    used = {spec_of(parse_options(command)).policy for command, _ in EXAMPLES}
    for policy in builtin_policies().describe_policies():
        assert f"\n| `{policy['name']}` | " in PAGE
        assert policy["name"] in used | set(DEFAULTS.values())
    for option in OPTIONS:
        assert f"\n| `{option}` | " in PAGE
    for mode in Mode:
        assert f"`{mode}`" in PAGE
