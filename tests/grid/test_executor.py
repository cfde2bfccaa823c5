"""Calls of functions as tasks on embedded clusters."""

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from types import ModuleType

import pytest

import koalapy
from koalapy import Grid, GridError
from koalapy.client.executor import TaskFuture
from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import MAX_WAIT_S, wait_until

pytestmark = pytest.mark.processes

MODEL = """
import os, time

def square(number, power=2):
    print("computes", number)
    return number**power

def fail(text):
    raise ValueError(text)

def make_unpicklable():
    return lambda: None

def end(code):
    os._exit(code)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.05)
    return os.environ["KOALA_NODE"]
"""
Start = Callable[..., EmbeddedGrid]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that is sent along with the calls."""
    (tmp_path / "koala_test_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "koala_test_model", raising=False)
    return importlib.import_module("koala_test_model")


def connect(embedded: EmbeddedGrid, monkeypatch: pytest.MonkeyPatch) -> Grid:
    monkeypatch.setenv("XDG_STATE_HOME", str(embedded.state))
    return koalapy.connect(embedded.url)


def runs(future: TaskFuture[str]) -> bool:
    return future.job is not None and future.job.state == "running"


def test_calls_return_their_results_and_raise_their_exceptions(
    make_grid: Start, model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = connect(make_grid(), monkeypatch)
    with grid.executor(walltime="1m", stage=[model.__file__]) as executor:
        squares = list(executor.map(model.square, range(5)))
        cube = executor.submit(model.square, 3, power=3)
        failed, odd, ended = (
            executor.submit(function, *arguments)
            for function, *arguments in ((model.fail, "no luck"), (model.make_unpicklable,), (model.end, 7))
        )
    assert squares == [0, 1, 4, 9, 16]
    assert cube.result() == 27
    assert cube.job is not None
    assert cube.job.output() == "computes 3\n"
    error = failed.exception()
    assert isinstance(error, ValueError)
    assert "in fail" in error.__notes__[0]
    assert failed.job is not None
    assert failed.job.state == "failed"
    assert "cannot be sent" in odd.exception().__notes__[0]  # type: ignore[union-attr]
    with pytest.raises(GridError, match="without a result: the program exited with 7"):
        ended.result()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(model.square, 1)


def test_rejected_calls_raise_the_rejection(
    make_grid: Start, model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = connect(make_grid(), monkeypatch)
    with pytest.raises(GridError, match="cannot be sent"), grid.executor() as executor:
        executor.submit(lambda: None)
    with grid.executor(nodes=20) as executor:
        future = executor.submit(model.square, 1)
    with pytest.raises(GridError, match="the whole grid has 8 nodes"):
        future.result()


def test_cancelled_future_cancels_its_running_task(
    make_grid: Start, model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = connect(make_grid(), monkeypatch)
    with grid.executor(stage=[model.__file__]) as executor:
        first, second = (executor.submit(model.wait_for, str(tmp_path / name)) for name in ("first", "second"))
        wait_until(lambda: runs(first) and runs(second), "both calls to run")
        assert first.cancel()
        (tmp_path / "second").touch()
        assert second.result(MAX_WAIT_S).startswith(("north", "south"))
    assert first.job is not None
    assert first.job.wait(MAX_WAIT_S).state == "cancelled"
    with pytest.raises(CancelledError):
        first.result()


def test_calls_survive_a_killed_daemon(
    make_grid: Start, model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = make_grid()
    grid = connect(embedded, monkeypatch)
    with grid.executor(nodes=2, stage=[model.__file__]) as executor:
        future = executor.submit(model.wait_for, str(tmp_path / "gate"))
        wait_until(lambda: runs(future), "the call to run")
        port = int(embedded.url.rpartition(":")[2])
        embedded.kill_daemon()
        (tmp_path / "gate").touch()
        embedded.start(port)
    assert future.result().startswith(("north", "south"))
