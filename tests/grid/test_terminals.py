"""Terminals on the nodes of jobs, and programs with a client's standard input: ``koala shell`` and ``koala run``."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.cli.terminal import Terminal
from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.grid.grid import Grid, wait_until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]
ONE = {"type": "flexible", "total_size": 1}
ON_BOTH = {"type": "fixed", "components": [{"size": 2, "cluster": "north"}, {"size": 1, "cluster": "south"}]}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    embedded = EmbeddedGrid(tmp_path_factory.mktemp("terminals") / "data")
    yield embedded.start()
    close_grid(embedded)


@pytest.fixture
def job(grid: EmbeddedGrid) -> Iterator[int]:
    """Yield a running job on two clusters, and cancel it."""
    ident = grid.submit(ON_BOTH, "sleep", "600", launcher="processes")
    grid.wait_for_state(ident, "running")
    yield ident
    grid.cancel(ident)
    grid.wait_until_idle()


def open_terminal(grid: Grid, *arguments: object) -> Terminal:
    environment = grid.client_environment | {"TERM": "xterm-256color"}
    return Terminal([*grid.koala_command, *map(str, arguments)], environment)


def send(terminal: Terminal, command: str, pattern: str) -> str:
    """Type a command, and return the output up to a match of the pattern."""
    terminal.send_text(f"{command}\n")
    return terminal.expect(pattern)


def wait_for_size(terminal: Terminal, size: str) -> None:
    """Ask for the size of a terminal until its change has arrived there."""
    wait_until(lambda: send(terminal, "echo si''ze=$(stty size)", r"size=\d+ \d+").endswith(size), f"the size {size}")


def list_shells(grid: Grid, ident: int) -> list[int]:
    """Return the shells and programs on the terminals of a job."""
    return [worker.pid for worker in grid.list_workers(f"{ident}.") if "600" not in worker.command]


def wait_for_no_shell(grid: Grid, ident: int) -> None:
    wait_until(lambda: not list_shells(grid, ident), "the shells of the job to end")


def test_shells_on_nodes_of_every_resource_manager(wide_grid: Grid) -> None:
    """One shell for each ends with an exit code, at the death of its client, and with the job."""
    ident = wide_grid.submit(wide_grid.request_on_managers(), "sleep", "600")
    wide_grid.wait_for_state(ident, "running")
    with ExitStack() as stack:
        shells = {
            cluster: stack.enter_context(open_terminal(wide_grid, "shell", ident, "--cluster", cluster, "--node", "1"))
            for cluster in wide_grid.managers
        }
        for cluster, shell in shells.items():
            shell.expect(rf"terminal on \S+ of {cluster}")
            shell.resize(132, 50)
            wait_for_size(shell, "50 132")
            shell.send_text("echo on=$KOALA_CLUSTER job=$KOALA_JOB term=$TERM\n")
            shell.expect(rf"on={cluster} job={ident} term=xterm-256color")
            send(shell, "sh -c 'echo st$((40 + 2)); exec sleep 500'", "st42")
            shell.send_text("\x1a")
            shell.expect("Stopped")
        first, *others = shells.values()
        first.send_text("exit 7\n")
        first.send_text("exit 7\n")
        assert first.wait_for_exit() == 7
        for other in others[1:]:
            assert other.hang_up() == 128 + signal.SIGHUP
        wait_until(lambda: len(list_shells(wide_grid, ident)) == 2, "the other shell and its sleep to remain")
        assert wide_grid.get_job(ident)["state"] == "running"
        wide_grid.cancel(ident)
        others[0].expect("the job's program has ended")
        assert others[0].wait_for_exit() == 1
    assert wide_grid.wait_for_end(ident)["state"] == "cancelled"
    wide_grid.wait_until_idle()


def test_shell_on_running_job_has_job_control_and_environment(grid: EmbeddedGrid, job: int) -> None:
    with open_terminal(grid, "shell", job) as terminal:
        terminal.expect(r"terminal on \S+ of north")
        terminal.send_text("echo job=$KOALA_JOB term=$TERM; stty size\n")
        terminal.expect(rf"job={job} term=xterm-256color\s+24 80")
        send(terminal, "sh -c 'echo st$((40 + 2)); exec sleep 500'", "st42")
        terminal.send_text("\x1a")
        terminal.expect("Stopped")
        terminal.send_text("exit 7\n")
        terminal.send_text("exit 7\n")
        assert terminal.wait_for_exit() == 7
    assert grid.get_job(job)["state"] == "running"


def test_shell_follows_the_size_of_the_window(grid: EmbeddedGrid, job: int) -> None:
    with open_terminal(grid, "shell", job, "--cluster", "south") as terminal:
        terminal.expect("terminal on")
        send(terminal, "trap 'echo size=$(stty size)' WINCH; echo rea''dy", "ready")
        terminal.resize(132, 50)
        terminal.expect("size=50 132")
        terminal.resize(0, 0)
        wait_for_size(terminal, "24 80")
        send(terminal, "exit", "exit")
        assert terminal.wait_for_exit() == 0


@pytest.mark.parametrize("node", ["1", "{name}"])
def test_shell_on_another_node_runs_there(grid: EmbeddedGrid, job: int, node: str) -> None:
    names = grid.http.get(f"/api/v1/jobs/{job}").json()["components"]
    host = next(component for component in names if component["cluster"] == "north")["hosts"][1]
    with open_terminal(
        grid, "shell", job, "--node", node.format(name=host), "--", "sh", "-c", "echo on=$KOALA_HOST."
    ) as terminal:
        terminal.expect(rf"on={host}\.")
        assert terminal.wait_for_exit() == 0


def test_detaching_ends_the_shell_and_not_the_job(grid: EmbeddedGrid, job: int) -> None:
    with open_terminal(grid, "shell", job) as terminal:
        terminal.expect("terminal on")
        # A shell may leave a process that does not run its program yet.
        send(terminal, "sleep 1234 & until grep -qx sleep /proc/$!/comm; do :; done; echo st''arted", "started")
        terminal.send_text("~.")
        assert terminal.wait_for_exit() == 0
    wait_for_no_shell(grid, job)
    assert grid.get_job(job)["state"] == "running"
    (opened, ended) = grid.http.get("/api/v1/audit", params={"action": "open_terminal"}).json()["entries"][-2:]
    assert opened["target"] == ended["target"] == f"job {job}"
    assert opened["detail"].endswith("of north, opened")
    assert "the client has disconnected" in ended["detail"]


@pytest.mark.parametrize("is_killed", [True, False])
def test_lost_client_ends_its_shell(grid: EmbeddedGrid, job: int, is_killed: bool) -> None:
    """The client is killed, or its terminal is closed; the shell ignores the hangup."""
    with open_terminal(grid, "shell", job) as terminal:
        terminal.expect("terminal on")
        send(terminal, "trap '' HUP; echo st''ubborn", "stubborn")
        if not is_killed:
            assert terminal.hang_up() == 128 + signal.SIGHUP
    wait_for_no_shell(grid, job)


def test_closed_output_ends_the_client_without_a_message(grid: EmbeddedGrid, job: int) -> None:
    command = [*grid.koala_command, "shell", str(job), "--", "yes"]
    environment = grid.environment | {"KOALA_URL": grid.url}
    client = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert client.stdout is not None
    assert client.stdout.read(2) == b"y\r"
    client.stdout.close()
    assert (client.wait(60), client.stderr and client.stderr.read()) == (1, b"")
    wait_for_no_shell(grid, job)


def test_endless_output_delays_no_other_client_and_is_interrupted(grid: EmbeddedGrid, job: int) -> None:
    """A client that reads nothing holds one window of output; others go on; Ctrl-C still arrives."""
    with open_terminal(grid, "shell", job) as flooded, open_terminal(grid, "shell", job) as other:
        flooded.expect("terminal on")
        other.expect("terminal on")
        flooded.send_text("yes koalas-everywhere\n")
        flooded.expect("koalas-everywhere\r\nkoalas")
        send(other, "echo i''dle", "idle")
        flooded.send_text("\x03")
        send(flooded, "echo do''ne", "done")
        send(flooded, "exit", "exit")
        assert flooded.wait_for_exit() == 0


def test_large_output_arrives_complete(grid: EmbeddedGrid, job: int) -> None:
    count = 100_000_000
    command = ["shell", str(job), "--", "sh", "-c", f"stty -opost; head -c {count} /dev/zero"]
    client = subprocess.Popen(
        [*grid.koala_command, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=grid.environment | {"KOALA_URL": grid.url},
    )
    assert client.stdout is not None
    received = 0
    while data := client.stdout.read(1 << 20):
        received += len(data)
    assert (client.wait(), received) == (0, count)


def test_input_of_a_pipe_is_typed_and_ended(grid: EmbeddedGrid, job: int) -> None:
    result = grid.run_koala("shell", str(job), input="echo fr''om-pipe\nexit 5\n")
    assert result.returncode == 5, result.stderr
    assert "from-pipe" in result.stdout
    result = grid.run_koala("shell", str(job), "--", "sh", "-c", "stty -echo; wc -c", input="12345\n")
    assert result.stdout.split()[-1] == "6", result


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["999999"], 3, "there is no job 999999"),
        (["{job}", "--cluster", "west"], 3, "has no nodes on west; it runs on north, south"),
        (["{job}", "--node", "9"], 1, "'9' is no node of the job on north"),
        (["{job}", "--", "no-such-program"], 1, "command not found: no-such-program"),
        (["x"], 2, "'x' is not a job"),
        ([], 2, "no job is given"),
        (["--flexible", "0"], 2, "--flexible"),
    ],
)
def test_shell_with_wrong_argument_says_what_is_wrong(
    grid: EmbeddedGrid, job: int, arguments: list[str], code: int, message: str
) -> None:
    result = grid.run_koala("shell", *(argument.format(job=job) for argument in arguments))
    assert result.returncode == code, result.stderr
    assert message in result.stderr


def test_end_of_the_job_ends_its_shells(grid: EmbeddedGrid) -> None:
    ident = grid.submit(ONE, "sleep", "600")
    grid.wait_for_state(ident, "running")
    with open_terminal(grid, "shell", ident) as terminal:
        terminal.expect("terminal on")
        send(terminal, "echo rea''dy", "ready")
        grid.cancel(ident)
        terminal.expect("the job's program has ended")
        assert terminal.wait_for_exit() == 1
    grid.wait_until_idle()


@pytest.mark.parametrize("process", ["agent", "daemon"])
def test_restart_ends_the_shell_with_a_message_and_the_job_stays(make_grid: MakeGrid, process: str) -> None:
    grid = make_grid()
    ident = grid.submit(ONE, "sleep", "600")
    grid.wait_for_state(ident, "running")
    cluster = grid.get_job(ident)["components"][0]["cluster"]
    with open_terminal(grid, "shell", ident) as terminal:
        terminal.expect("terminal on")
        send(terminal, "echo rea''dy", "ready")
        if process == "agent":
            grid.find_agent(cluster).kill()
            terminal.expect(f"the connection to cluster {cluster} was lost")
        else:
            grid.stop_daemon()
            terminal.expect("the daemon is shutting down; the job goes on")
            grid.start()
        assert terminal.wait_for_exit() == 1
    wait_for_no_shell(grid, ident)
    # The runner connects to the next agent within some seconds.
    wait_until(lambda: grid.run_koala("shell", str(ident), "--", "true").returncode == 0, "another terminal to open")
    grid.cancel(ident)


def test_shell_with_a_request_holds_nodes_until_it_ends(grid: EmbeddedGrid) -> None:
    with open_terminal(grid, "shell", "--flexible", "2", "--walltime", "1h", "--name", "debugging") as terminal:
        terminal.expect("terminal on")
        send(terminal, "echo nodes=$KOALA_NODES", "nodes=2")
        (job,) = grid.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"]
        assert job["name"] == "debugging"
        send(terminal, "exit 3", "exit")
        assert terminal.wait_for_exit() == 3
    assert grid.wait_for_end(job["id"])["state"] == "cancelled"
    grid.wait_until_idle()


PLAIN = ("--flexible", "1", "--launcher", "processes", "-q")


def run(grid: EmbeddedGrid, *arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return grid.run_koala("run", *PLAIN, "--", *arguments, **options)


def test_run_passes_input_output_and_exit_code(grid: EmbeddedGrid) -> None:
    text = "".join(f"line {number}\n" for number in range(100_000))
    result = run(grid, "sh", "-c", "cat; exit 9", input=text)
    assert (result.returncode, result.stdout) == (9, text), result.stderr[-2000:]
    speak = "echo one; printf 'two\\016\\n' >&2; printf last; printf 'end\\020' >&2; exit 4"
    for arguments, output, errors in (
        ([*PLAIN], "one\nlast", "two\x0e\nend\x10"),
        (["--label", *PLAIN], "0: one\n0: last\n", "0: two\x0e\n0: end\x10\n"),
    ):
        result = grid.run_koala("run", *arguments, "--", "sh", "-c", speak)
        assert (result.returncode, result.stdout) == (4, output)
        assert result.stderr.startswith(errors), result.stderr
    result = run(grid, "sh", "-c", "sleep 0.2; echo over", input=text)
    assert (result.returncode, result.stdout) == (0, "over\n"), result.stderr[-2000:]


def test_run_passes_input_and_exit_code_on_every_resource_manager(wide_grid: Grid) -> None:
    """Rank 0 reads the input, the other process has none."""
    text = "".join(f"line {number}\n" for number in range(20_000))
    program = '[ "$KOALA_RANK" = 0 ] || exec wc -c; cat; exit 9'

    def run_on(cluster: str) -> "subprocess.CompletedProcess[str]":
        request = ["--fixed", f"{cluster}:2", "--launcher", "processes", "--chdir", "/tmp", "-q"]
        return wide_grid.run_koala("run", *request, "--", "sh", "-c", program, input=text)

    with ThreadPoolExecutor() as pool:
        for result in pool.map(run_on, wide_grid.managers):
            assert (result.returncode, len(result.stdout)) == (9, len(text) + 2), result.stderr[-2000:]
            assert sorted(result.stdout.splitlines()) == sorted(["0", *text.splitlines()])


@pytest.mark.mpi
def test_run_passes_input_to_rank_0_of_an_mpi_program(wide_grid: Grid) -> None:
    program = "import sys; from mpi4py.MPI import COMM_WORLD as w; t = sys.stdin.read() if w.rank == 0 else ''; "
    program += "n = w.bcast(len(t)); w.rank or print(n, w.size)"
    sites = ",".join(f"{name}:2" for name in wide_grid.managers)
    request = ["--fixed", sites, "--ppn", "1", "--chdir", "/tmp", "-q"]
    result = wide_grid.run_koala("run", *request, "--", wide_grid.python, "-c", program, input="x" * 1_000_000)
    expected = f"1000000 {2 * len(wide_grid.managers)}\n"
    assert (result.returncode, result.stdout) == (0, expected), result.stderr[-2000:]


def test_interrupting_a_run_twice_cancels_its_job(grid: EmbeddedGrid) -> None:
    with open_terminal(
        grid, "run", "--flexible", "1", "--launcher", "processes", "--", "sh", "-c", "echo up; sleep 600"
    ) as run:
        run.expect("up\r")
        run.send_text("\x03")
        run.expect("interrupt again within 5 s to cancel it")
        run.send_text("\x03")
        run.expect("was cancelled")
        assert run.wait_for_exit() == 130
    grid.wait_until_idle()


@pytest.mark.parametrize("process", ["agent", "daemon"])
def test_input_survives_a_restart(make_grid: MakeGrid, process: str) -> None:
    grid = make_grid()
    folder = grid.make_folder()
    program = "read a; echo $a; cat >rest; echo end >&2"
    client = subprocess.Popen(
        [*grid.koala_command, "run", *PLAIN, "--chdir", folder.path, "--", "sh", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=grid.environment | {"KOALA_URL": grid.url},
    )
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("first\n")
    client.stdin.flush()
    assert client.stdout.readline() == "first\n"
    port = int(grid.url.rpartition(":")[2])
    if process == "daemon":
        grid.kill_daemon()
    else:
        grid.find_agent("north").kill()
    client.stdin.write(before := "before\n" * 20_000)
    client.stdin.flush()
    if process == "daemon":
        grid.start(port)
    client.stdin.write(after := "after\n" * 100_000)
    client.stdin.close()
    assert client.wait(120) == 0
    assert folder.read("rest", "north") == before + after
    assert grid.wait_for_end(1)["state"] == "succeeded"
    assert [grid.run_koala("logs", "1", option).stdout for option in ("--output", "--error")] == ["first\n", "end\n"]
