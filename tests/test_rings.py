"""The plugin that puts each test in its ring, and the check of ring 1."""

from pathlib import Path

import pytest

from tests.check_rings import findings

pytest_plugins = ["pytester"]

RINGS_PLUGIN = ("-p", "tests.rings", "-p", "no:cacheprovider", "-o", "addopts=")
MARKERS = "[pytest]\nmarkers =\n    promise:\n    processes:\n    testbed:\n    nightly:\nasyncio_mode = auto\n"


def run_pytest(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    pytester.makeini(MARKERS)
    pytester.makepyfile(source)
    pytester.syspathinsert(Path(__file__).parents[1])
    return pytester.runpytest_subprocess(*RINGS_PLUGIN, *arguments)


@pytest.mark.processes
@pytest.mark.parametrize(("rings", "passed"), [("1,3", 3), ("2,4", 5)])
def test_rings_option_runs_the_tests_of_these_rings(pytester: pytest.Pytester, rings: str, passed: int) -> None:
    source = """
        import pytest
        from hypothesis import given, strategies

        def test_plain(): pass
        @pytest.mark.promise
        def test_promise(): pass
        @pytest.mark.processes
        def test_processes(): pass
        @pytest.mark.parametrize("world", ["testbed"])
        def test_testbed(world): pass
        @pytest.mark.skipif(False, reason="root missing")
        def test_as_root(): pass
        @pytest.mark.nightly
        @given(strategies.integers())
        def test_property(n): pass
        @pytest.mark.nightly
        def test_nightly(): pass
        @pytest.mark.nightly
        @pytest.mark.parametrize("world", ["testbed"])
        def test_long_on_testbed(world): pass
    """
    run_pytest(pytester, source, "--rings", rings).assert_outcomes(passed=passed)


@pytest.mark.processes
def test_tests_of_ring_1_have_limits_of_time(pytester: pytest.Pytester) -> None:
    source = """
        import pytest
        from hypothesis import HealthCheck, given, settings, strategies

        def timeout_of(request):
            marker = request.node.get_closest_marker("timeout")
            return marker and marker.args[0]
        def test_plain(request): assert timeout_of(request) == 30
        @pytest.mark.timeout(3)
        def test_chosen(request): assert timeout_of(request) == 3
        @pytest.mark.promise
        def test_promise(request): assert timeout_of(request) == 300
        @given(n=strategies.integers())
        @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
        def test_property(request, n): assert timeout_of(request) == 300
        @pytest.mark.processes
        def test_processes(request): assert timeout_of(request) is None
    """
    run_pytest(pytester, source, "--rings", "1,2").assert_outcomes(passed=5)


@pytest.mark.processes
def test_ring_1_rejects_processes_sleeps_and_connections(pytester: pytest.Pytester) -> None:
    source = """
        import contextlib, socket, subprocess, threading, time, pytest

        begun = threading.Event()
        def sleep_later():
            begun.wait()
            time.sleep(0.002)
        left = threading.Thread(target=sleep_later, daemon=True)

        def test_that_leaves_a_thread(): left.start()
        def test_after_it():
            begun.set()
            left.join()
        def test_process(): subprocess.run(["true"])
        def test_sleep(): time.sleep(0.001)
        def test_network():
            with contextlib.suppress(OSError), socket.socket() as s:
                s.setblocking(False)
                s.connect(("198.18.0.1", 9))
        def test_loopback():
            with socket.create_server(("127.0.0.1", 0)) as s: socket.create_connection(s.getsockname()).close()
        @pytest.mark.processes
        def test_marked(): subprocess.run(["true"])
    """
    result = run_pytest(pytester, source)
    result.assert_outcomes(passed=7, errors=3)
    result.stdout.fnmatch_lines(["*- starts*true*", "*- sleeps 0.001 s in *, line *", "*- connects to 198.18.0.1"])
    result.stdout.no_fnmatch_line("*0.002 s*")


@pytest.mark.processes
@pytest.mark.parametrize(("options", "seed"), [((), "1"), (("--hypothesis-seed", "7"), "7")])
def test_failed_property_prints_the_command_that_repeats_it(
    pytester: pytest.Pytester, options: tuple[str, ...], seed: str
) -> None:
    source = """
        from hypothesis import given, strategies

        @given(strategies.integers())
        def test_small(n): assert n < 1000
    """
    result = run_pytest(pytester, source, *options)
    result.stdout.fnmatch_lines([f"*-m pytest --hypothesis-seed={seed} *::test_small"])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def test_a():\n    time.sleep(1)", 1),
        ("async def test_a():\n    await asyncio.sleep(delay)", 1),
        ("async def test_a():\n    await asyncio.sleep(0)", 0),
        ("def test_a(monkeypatch):\n    monkeypatch.setattr(module, 'SOME_TIMEOUT_S', 1)", 1),
        ("def test_a(monkeypatch):\n    monkeypatch.setattr(module, 'MAX_WAIT', 1)", 1),
        ("def test_a(monkeypatch):\n    monkeypatch.setattr(module, 'MAX_JOBS', 1)", 0),
        ("def test_a(monkeypatch):\n    monkeypatch.setattr(module, 'function', f)", 0),
        ("@pytest.mark.processes\ndef test_a():\n    time.sleep(1)", 0),
        ("pytestmark = [pytest.mark.processes, needs(ROOT)]\ndef test_a():\n    time.sleep(1)", 0),
        ("pytestmark = needs(ROOT)\ndef test_a():\n    time.sleep(1)", 1),
    ],
)
def test_check_finds_sleeps_and_replaced_durations(source: str, count: int) -> None:
    assert len(list(findings(source))) == count
