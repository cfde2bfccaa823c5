"""The way of a job over two clusters, of a real daemon, as a collector gets it."""

from collections.abc import Callable

import pytest

from tests.collector import Collector, attributes, tree
from tests.grid.embedded import Embedded

pytestmark = [pytest.mark.processes, pytest.mark.grid]


def test_a_co_allocated_job_is_one_trace_with_a_span_for_each_cluster(make_grid: Callable[..., Embedded]) -> None:
    with Collector() as collector:
        grid = make_grid(KOALA_TRACING__ENDPOINT=collector.endpoint)
        ident = grid.submit(grid.six, "true", name="both")
        assert grid.wait(ident)["state"] == "succeeded"
        spans = collector.wait(1)
    inside = {(name, "attempt") for name in ("claiming", "starting", "running", "component")}
    assert tree(spans) == {("job", ""), ("queued", "job"), ("attempt", "job"), *inside}
    assert len({span.trace_id for span in spans}) == 1
    components = [attributes(span) for span in spans if span.name == "component"]
    assert sorted(str(told["koala.cluster"]) for told in components) == ["north", "south"]
    assert sum(int(str(told["koala.nodes"])) for told in components) == 6
    (root,) = [attributes(span) for span in spans if span.name == "job"]
    assert (root["koala.job"], root["koala.job_name"]) == (ident, "both")
