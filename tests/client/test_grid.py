"""The Python client against a server with fake services, of which commands decide how jobs end."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import koalapy
from koalapy import Exit, Grid, GridError
from koalapy.client.client import Client
from koalapy.client.submission import build_submission
from tests.cli.conftest import PATIENT, TOKEN, Server


@pytest.fixture
def grid(server: Server, monkeypatch: pytest.MonkeyPatch) -> Grid:
    monkeypatch.setenv("KOALA_URL", server.url)
    monkeypatch.setenv("KOALA_TOKEN", TOKEN)
    grid = koalapy.connect()
    grid.client = Client(server.url, TOKEN, timeouts=PATIENT)
    return grid


@pytest.mark.processes
def test_import_loads_nothing_of_the_client() -> None:
    program = "import koalapy, sys; print(*(name for name in sys.modules if name.startswith('koalapy')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == ["koalapy"]


def test_import_of_unknown_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'submit'"):
        _ = koalapy.submit  # type: ignore[attr-defined]
    assert set(koalapy.__all__) == {name for name in koalapy.__all__ if getattr(koalapy, name)}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"request": {"type": "flexible", "total_size": 1}}),
        (
            {"flexible": 4, "min_component": 2, "split": [[2, 2], "4"]},
            {"request": {"type": "flexible", "total_size": 4, "min_component_size": 2, "split_options": [[2, 2], [4]]}},
        ),
        ({"nonfixed": [2, 4]}, {"request": {"type": "nonfixed", "components": [{"size": 2}, {"size": 4}]}}),
        ({"fixed": {"north": 2}}, {"request": {"type": "fixed", "components": [{"cluster": "north", "size": 2}]}}),
        ({"fixed": "north:2"}, {"request": {"type": "fixed", "components": [{"cluster": "north", "size": 2}]}}),
        ({"walltime": timedelta(minutes=90)}, {"walltime": 5400.0}),
        ({"begin": datetime(2026, 12, 1, 16, tzinfo=UTC)}, {"begin": "2026-12-01T16:00:00+00:00"}),
        ({"env": {"A": "1"}, "ppn": 2}, {"environment": {"A": "1"}, "processes_per_node": 2}),
        ({"inputs": ["m:as=x", {"file": "f"}]}, {"inputs": [{"file": "m", "as": "x"}, {"file": "f"}]}),
        ({"workdir": Path("/data")}, {"workdir": "/data"}),
        ({"each_line": ["1", "2"], "array": "%2", "name": None}, {"each_line": ["1", "2"], "array": "%2"}),
        ({"after": 7}, {"after": ["7"]}),
        ({"after": [koalapy.Job(None, {"id": 7}), "8:any"]}, {"after": ["7", "8:any"]}),  # type: ignore[arg-type]
    ],
)
def test_options_become_fields_of_the_submission(
    options: dict[str, Any], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    body, paths = build_submission("echo 'a b'", options)
    assert (body["command"], paths) == (["echo", "a b"], [])
    assert {name: body[name] for name in fields} == fields


def test_unknown_option_is_rejected_with_the_similar_one() -> None:
    with pytest.raises(GridError) as caught:
        build_submission("x", {"waltime": "1h"})
    assert (caught.value.code, caught.value.field) == (Exit.USAGE, "waltime")
    assert "walltime" in caught.value.hint


def test_job_that_ends_has_state_code_and_output(grid: Grid) -> None:
    job = grid.submit(["echo", "hello"], flexible=2)
    assert job.wait(timeout=60) is job
    assert (job.state, job.exit_code, job.output()) == ("succeeded", 0, "hello\n")
    assert "".join(job.follow()) == "hello\n"
    failed = grid.submit("exit 3", flexible=2).wait()
    assert (failed.state, failed.exit_code) == ("failed", 3)
    assert repr(job) == "<Job 1 succeeded>"


def test_missing_output_is_a_warning(grid: Grid, server: Server) -> None:
    server.service.incomplete_output.add(1)
    with pytest.warns(UserWarning, match="a part of the output of job 1 is missing"):
        assert grid.submit("echo x", flexible=2).output() == "x\n"


def test_waiting_job_times_out_is_explained_and_cancelled(grid: Grid) -> None:
    job = grid.submit("program", flexible=6)
    with pytest.raises(GridError) as caught:
        job.wait(timeout=0)
    assert caught.value.code is Exit.TIMEOUT
    assert repr(job.explain()) == "job 1 waits: too few idle nodes"
    assert repr(job) == "<Job 1 queued: too few idle nodes>"
    assert [waiting.id for waiting in grid.jobs(state="waiting")] == [1]
    job.cancel()
    assert (job.state, grid.jobs()) == ("cancelled", [])
    assert [ended.id for ended in grid.jobs("ended")] == [1]
    assert grid.job(job).state == grid.job("1").state == "cancelled"


def test_rejection_is_an_error_with_code_field_and_hint(grid: Grid) -> None:
    with pytest.raises(GridError) as caught:
        grid.submit("x", flexible=20)
    error = caught.value
    assert (error.code, error.problem, error.status) == (Exit.USAGE, "invalid-value", 422)
    assert (error.field, error.hint) == ("request.total_size", "ask for at most 8")
    with pytest.raises(GridError) as caught:
        grid.job(9)
    assert caught.value.code is Exit.NOT_FOUND


def test_map_quotes_values_in_the_command(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []

    def submit(client: Client, body: dict[str, Any], key: str) -> dict[str, Any]:
        bodies.append(body)
        return {"id": 1, "tasks": {"size": 3}}

    monkeypatch.setattr(Client, "submit", submit)
    tasks = grid.map("./sim --name='a b' --seed={} {}", ["x y", "$HOME", "'"], at_once=2, nonfixed=[1])
    assert len(tasks) == 3
    assert [task.id for task in tasks] == [2, 3, 4]
    assert tasks[-1].id == 4
    (body,) = bodies
    assert (body["array"], body["each_line"], body["launcher"]) == ("%2", ["x y", "$HOME", "'"], "processes")
    line = '"$KOALA_ARRAY_LINE"'
    assert body["command"] == ["sh", "-c", f"exec ./sim '--name=a b' --seed={line} {line}"]


def test_objects_show_themselves_as_text_and_html(grid: Grid) -> None:
    grid.submit("start <b>", flexible=2, name="a&b")
    table = grid.jobs()
    assert repr(table).splitlines()[0].split()[:5] == ["ID", "NAME", "USER", "PRI", "STATE"]
    assert "<td>a&amp;b</td>" in table._repr_html_()
    picture = table[0]._repr_html_()
    assert picture.count("<rect") == 2
    assert "placed for " in picture
    assert picture.endswith("</svg>")
    assert "<td>north</td>" in grid._repr_html_()
    assert grid.clusters().records[0]["name"] == "north"


def test_table_becomes_data_frame_where_pandas_is_installed(grid: Grid) -> None:
    pandas = pytest.importorskip("pandas")
    frame = grid.clusters().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["name"]) == ["north", "south"]


def test_connect_without_daemon_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GridError) as caught:
        koalapy.connect("http://127.0.0.1:9", TOKEN)
    assert caught.value.code is Exit.UNREACHABLE
