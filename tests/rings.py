"""The rings of the suite: the tests that a command runs, their permissions and their time limits.

Ring 1 runs in one process on virtual time. Ring 2 starts real processes, ring 3 uses the testbed's containers, ring 4
takes hours. A test belongs to ring 1 by default. It belongs to ring 2 if it, or its file by ``pytestmark``, is marked
``processes``, needs root or has the parameter ``postgresql``; to ring 3 with ``testbed``; to ring 4 if ``nightly``.
A test marked ``promise`` belongs to ring 1 and may start processes all the same.
"""

import asyncio
import gc
import ipaddress
import os
import random
import resource
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.virtual_time import VirtualTimeLoop

RINGS = {"in-process": 1, "promise": 1, "processes": 2, "testbed": 3, "nightly": 4}
"""The number of the ring by the marker of its tests; tests of the first have no marker."""
DEFAULT_RINGS = "1,2,3"
BUDGETS_S = {1: 1.0, 2: 60.0}
"""Seconds that a test of the ring may take: of processor time in ring 1, of real time in ring 2."""
NEEDS_ROOT = "root missing"
"""The skip reason of tests that need root: those that have it in ring 1 would be skipped in an ordinary account."""
TIMEOUT_S, LONG_TIMEOUT_S = 30.0, 300.0
"""Seconds of real time after which a test of ring 1 fails: one in this process, and one that starts processes or states
a property, of which a failing example is shrunk. A timeout during that would count as a second failure of the test."""
MAX_LISTED = 30
"""Tests over their budget that the summary lists."""
FAST_EXAMPLES, THOROUGH_EXAMPLES = 25, 1000
"""Examples of a property in rings 1 to 3, and in ring 4."""
FIXED_SEED = 1
"""Seed of the examples in rings 1 to 3, so that a change is tested by the same examples as its parent. Ring 4 draws
new ones."""

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Property tests check results, not the time of an example."""
GC_THRESHOLDS = 10_000, 10, 40
"""As ``gc.set_threshold`` takes them: ring 1 makes many apps, and the collector took a seventh of its time."""
settings.register_profile("fast", UNTIMED, max_examples=FAST_EXAMPLES)
settings.register_profile("thorough", UNTIMED, max_examples=THOROUGH_EXAMPLES)


def ring_of(item: pytest.Item) -> int:
    """Return the number of the item's ring."""
    if is_on_testbed(item.nodeid) and not item.get_closest_marker("nightly"):
        return RINGS["testbed"]
    if "[postgresql" in item.nodeid or any(
        mark.kwargs.get("reason") == NEEDS_ROOT for mark in item.iter_markers("skipif")
    ):
        return RINGS["processes"]
    return max((RINGS[marker] for marker in RINGS if item.get_closest_marker(marker)), default=1)


def is_promise(item: pytest.Item) -> bool:
    return item.get_closest_marker("promise") is not None


def is_on_testbed(nodeid: str) -> bool:
    file, _, name = nodeid.partition("::")
    return "/test_testbed" in file or "[testbed" in name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rings", help=f"comma-separated numbers of the rings to run (default: {DEFAULT_RINGS}); shows progress"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    rings = config.getoption("--rings")
    try:
        chosen = {int(ring) for ring in (rings or DEFAULT_RINGS).split(",")}
    except ValueError:
        raise pytest.UsageError(f"--rings {rings}: give numbers from 1 to 4 with commas between") from None
    settings.load_profile("thorough" if 4 in chosen else "fast")
    if chosen == {1}:
        gc.set_threshold(*GC_THRESHOLDS)
    is_worker = hasattr(config, "workerinput")
    if not is_worker and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = random.SystemRandom().getrandbits(32) if 4 in chosen else FIXED_SEED
    config.pluginmanager.register(_Selection(chosen), "ring-selection")
    config.pluginmanager.register(_Budgets(), "ring-budgets")
    if not is_worker:
        config.pluginmanager.register(_RepeatCommands(config), "repeat-commands")
        if rings and config.option.verbose == 0 and not config.option.collectonly:
            config.pluginmanager.register(_Progress(config), "progress-estimate")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests of ring 1 on virtual time, all others on the machine's clock."""
    if ring_of(item) == 1 and not is_promise(item):
        return {"virtual": VirtualTimeLoop}
    return {"system": asyncio.new_event_loop}


class _Selection:
    """Deselect the tests of other rings, and limit the time of the others.

    Ring 4 runs every property as well, with many examples.
    """

    def __init__(self, rings: set[int]) -> None:
        self._rings = rings

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if not self._is_chosen(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if self._is_chosen(item)]
        for item in items:
            if ring_of(item) == 1 and 4 not in self._rings and not item.get_closest_marker("timeout"):
                is_long = is_promise(item) or is_property(item)
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S if is_long else TIMEOUT_S))

    def _is_chosen(self, item: pytest.Item) -> bool:
        return ring_of(item) in self._rings or (4 in self._rings and is_property(item))


def is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


class _Guard:
    """Record what a test of ring 1 may not do: start a process, sleep, or leave this machine."""

    def __init__(self) -> None:
        self.is_active = False
        self.offences: list[str] = []
        self._earlier: set[int | None] = set()
        """Threads that an earlier test has left, which sleep for it."""
        sys.addaudithook(self._look)
        self._sleep = time.sleep  # Python before 3.13 raises no audit event for it.
        time.sleep = self._sleep_watched

    def begin(self) -> None:
        """Begin a test, in this thread."""
        self._earlier = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        self.offences.clear()
        self.is_active = True

    def _sleep_watched(self, seconds: float) -> None:
        if self.is_active and seconds > 0 and threading.get_ident() not in self._earlier:
            caller = sys._getframe(1)
            self.offences.append(f"sleeps {seconds:g} s in {caller.f_code.co_filename}, line {caller.f_lineno}")
        self._sleep(seconds)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_active and (offence := self._offence(event, args)):
            self.offences.append(offence)

    def _offence(self, event: str, args: tuple[Any, ...]) -> str:
        if event == "subprocess.Popen":
            return f"starts {args[1] if args[1] else args[0]}"[:200]
        if event in ("os.fork", "os.forkpty", "os.posix_spawn"):
            return f"calls {event}"
        if event == "socket.connect" and isinstance(args[1], tuple) and not _is_loopback(args[1][0]):
            return f"connects to {args[1][0]}"
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_guard = _Guard()


@pytest.fixture(autouse=True)
def stay_in_ring_1(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of ring 1 that starts a process, sleeps or connects to another machine."""
    if ring_of(request.node) > 1 or is_promise(request.node):
        yield
        return
    _guard.begin()
    yield
    _guard.is_active = False
    if _guard.offences:
        listing = "\n".join(f"- {offence}" for offence in dict.fromkeys(_guard.offences))
        pytest.fail(f"a test of ring 1 may not do this; mark it `processes` if it must:\n{listing}", pytrace=False)


def processor_time() -> float:
    """Return the seconds of processor time of this process and of its ended children."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


class _Budgets:
    """Measure each test, and list those that take longer than their ring allows. It is a report, not a failure."""

    def __init__(self) -> None:
        self._exceeded: list[tuple[float, int, str]] = []
        self._spent: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        ring = RINGS["processes"] if is_promise(item) else ring_of(item)
        report.user_properties.append(("ring", ring))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_PROCESSOR_TIME] = processor_time()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        item.user_properties.append(("processor-time", processor_time() - item.stash[_PROCESSOR_TIME]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._spent[report.nodeid] = self._spent.get(report.nodeid, 0.0) + report.duration
        if report.when != "teardown":
            return
        properties = dict(report.user_properties)
        ring, real = properties.get("ring", 1), self._spent.pop(report.nodeid)
        spent = properties.get("processor-time", 0.0) if ring == 1 else real
        if spent > BUDGETS_S.get(ring, float("inf")):
            self._exceeded.append((spent, ring, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._exceeded or not terminalreporter.config.getoption("--rings"):
            return
        terminalreporter.section(f"{len(self._exceeded)} tests over their budget")
        for spent, ring, nodeid in sorted(self._exceeded, reverse=True)[:MAX_LISTED]:
            terminalreporter.write_line(f"{spent:6.1f} s of {BUDGETS_S[ring]:g} s  ring {ring}  {nodeid}")


_PROCESSOR_TIME = pytest.StashKey[float]()


class _RepeatCommands:
    """Print the command that repeats each failed test, with the seed of the properties."""

    def __init__(self, config: pytest.Config) -> None:
        self._seed = config.option.hypothesis_seed

    def pytest_report_header(self) -> str:
        return f"seed of the properties: {self._seed}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
        if not failed:
            return
        terminalreporter.section("repeat")
        python = os.path.relpath(sys.executable)
        for nodeid, ring in dict.fromkeys(
            (report.nodeid, dict(getattr(report, "user_properties", ())).get("ring")) for report in failed
        ):
            rings = " --rings 4" if ring == RINGS["nightly"] else ""
            terminalreporter.write_line(
                f"{python} -m pytest --hypothesis-seed={self._seed}{rings} {shlex.quote(nodeid)}"
            )


class _Progress:
    """Print how many tests have ended and when the rest will have, instead of dots."""

    STEPS = 20
    """Lines that a whole run prints where the output is not a terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._began = time.monotonic()
        self._ended = self._told = 0

    def pytest_sessionstart(self) -> None:
        self._reporter: Any = self._plugins.getplugin("terminalreporter")
        self._reporter.write_line("finding the tests …")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("passed", "", "") if report.passed and report.when == "call" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        if not self._ended:
            self._began = time.monotonic()  # The times of the collection and of the first test predict nothing.
        self._ended += 1
        test_count = self._reporter._session.testscollected
        if not test_count:
            return
        remaining_s = (time.monotonic() - self._began) / self._ended * (test_count - self._ended)
        line = f"{self._ended} of {test_count} tests, about {_rounded(remaining_s)} left"
        if self._reporter.isatty:
            self._reporter.rewrite(line, erase=True)
        elif self._ended * self.STEPS // test_count > self._told:
            self._told = self._ended * self.STEPS // test_count
            self._reporter.ensure_newline()
            self._reporter.write_line(line)


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
