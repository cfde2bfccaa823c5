"""``koala change``: the options become a change of the waiting job, and offered commands make the offered change."""

import json
import shlex
from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from koalapy.api.job_changes import change_between
from koalapy.model.command_line import change_command
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Change, PlacedComponent, Placement
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from tests.api.test_job_changes import specs
from tests.cli.conftest import Koala, Server


def submit(koala: Koala, *options: str) -> None:
    assert koala("submit", "--flexible", "6", *options, "--", "program").code == 0


def test_change_keeps_options_that_are_not_given(koala: Koala, server: Server) -> None:
    submit(koala, "--min-component", "2", "--max-components", "3", "--coallocation", "2")
    result = koala("change", "1", "--flexible", "4", "--priority", "high", "--reset", "max-components")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("job 1 changed")
    spec = server.service.records[1].spec
    assert (spec.request, spec.coallocation, spec.priority) == (FlexibleRequest(4, 2), 2, Priority.HIGH)


def test_change_to_fixed_replaces_request(koala: Koala, server: Server) -> None:
    submit(koala)
    assert koala("change", "1", "--fixed", "north:2", "--json").code == 0
    assert server.service.records[1].spec.request == FixedRequest((ComponentRequest(2, "north"),))


def test_change_of_bound_alone_keeps_size(koala: Koala, server: Server) -> None:
    submit(koala)
    assert koala("change", "1", "--max-components", "2").code == 0
    assert server.service.records[1].spec.request == FlexibleRequest(6, max_components=2)


def test_change_that_contradicts_split_options_of_job_is_rejected(koala: Koala) -> None:
    submit(koala, "--split", "4,2")
    result = koala("change", "1", "--flexible", "5")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("koala: request.split_options[0] sums to 6")


def test_change_dry_run_changes_nothing(koala: Koala, server: Server) -> None:
    submit(koala)
    before = server.service.records[1]
    result = koala("change", "1", "--flexible", "2", "--dry-run")
    assert (result.code, result.out) == (0, "would be placed at once on north (4 nodes)\n")
    assert json.loads(koala("change", "1", "--flexible", "2", "--dry-run", "--json").out)["job"] == 1
    assert server.service.records[1] is before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(specs, specs)
def test_offered_command_makes_offered_change(koala: Koala, server: Server, old: JobSpec, new: JobSpec) -> None:
    submit(koala)
    number = max(server.service.records)
    old, new = (replace(spec, owner="ada", speed_ratio_min=None) for spec in (old, new))
    server.service.records[number] = replace(server.service.records[number], spec=old)
    words = shlex.split(change_command(number, change_between(old, new)))
    koala(*words[1:], "--dry-run")
    if koala(*words[1:]).code == 0:  # both specifications may be invalid
        assert server.service.records[number].spec == new


def test_offer_without_difference_is_command_without_options() -> None:
    spec = JobSpec(FlexibleRequest(2), ("p",))
    offer = Change("", None, "try it now, unchanged", spec, Placement((PlacedComponent(2, "north"),)))
    assert change_command(7, change_between(spec, offer.spec)) == "koala change 7"
