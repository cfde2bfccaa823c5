"""locald: no process outlives its job, nodes are exclusive, no client can crash it."""

import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from koalapy.agent.lrm.local.cluster import LocalConnection
from koalapy.agent.lrm.local.processes import HELD_BY_ANOTHER, SOCKET_NAME
from koalapy.model.errors import SiteRejected
from tests.agent.lrm.conftest import (
    Site,
    connect,
    eventually,
    is_alive,
    numbers_in,
    pid_of_locald,
    processes_of,
    stop_locald,
)
from tests.needs import ROOT, needs

pytestmark = pytest.mark.processes

DAEMON = "setsid sh -c 'sh -c \"echo \\$\\$; trap : TERM; while :; do sleep 0.1; done\" & exit' "
"""Starts an orphan with its own session that ignores SIGTERM, and prints its process id."""
UNMARKED = "setsid sh -c 'env -i sh -c \"echo \\$\\$; exec sleep 60\" & exit' "
"""Starts an orphan with its own session without the mark of its job, and prints its process id."""


def wait_for_pids(site: Site, count: int, name: str = "job") -> list[int]:
    return eventually(lambda: len(pids := numbers_in(site.output(name))) >= count and pids)


@pytest.mark.parametrize("daemon", [DAEMON, UNMARKED])
def test_job_ends_when_its_last_process_has_ended(site: Site, daemon: str) -> None:
    job = site.submit(daemon + "; until [ -s job.out ]; do sleep 0.02; done; exit 0")
    (pid,) = wait_for_pids(site, 1)
    record = site.wait(job)
    assert not is_alive(pid)
    assert (record["state"], record["exit_code"], record["lost"]) == ("ended", 0, False)


def test_cancel_ends_orphans_of_its_job_only(site: Site) -> None:
    other = site.submit(DAEMON + "; exec sleep 60", name="other")
    job = site.submit(DAEMON + "; exec sleep 60")
    (pid,), (pid_of_other,) = wait_for_pids(site, 1), wait_for_pids(site, 1, "other")
    site.connection.request("cancel", job=job, name="job")
    assert site.wait(job)["reason"] == "cancelled"
    assert (is_alive(pid), is_alive(pid_of_other)) == (False, True)
    assert site.find(other)["state"] == "running"


@needs(ROOT)
def test_server_that_gave_up_its_rights_ends_with_its_own_job_only(site: Site) -> None:
    server = "(setsid setpriv --reuid 65534 --clear-groups sh -c 'echo $$; exec sleep 60' &); exec sleep 60"
    job = site.submit(server, name="server")
    (pid,) = wait_for_pids(site, 1, "server")
    site.wait(site.submit("true"))
    assert is_alive(pid)
    site.connection.request("cancel", job=job, name="server")
    assert site.wait(job)["reason"] == "cancelled"
    assert not is_alive(pid)


def test_jobs_never_share_a_node(make_site: Callable[..., Site]) -> None:
    site = make_site(nodes=5)
    dice = random.Random(4)
    folder = site.cluster.directory
    script = f'l={folder}/$LOCALD_NODE.lock; mkdir $l || exit 99; sleep "$1"; rmdir $l || exit 98'
    jobs = []
    for k in range(60):
        argv = ["/bin/sh", "-c", script, "job", f"{dice.random() / 50:.4f}"]
        user = dice.choice(["grid", "alice"])
        jobs.append(site.submit("", argv=argv, name=f"job-{k}", nodes=dice.choice([1, 1, 2, 3, 5]), user=user))
    records = [site.wait(job) for job in jobs]
    assert {record["exit_code"] for record in records} == {0}
    assert all(len(set(record["nodes"])) == record["size"] for record in records)
    assert site.list()["idle"] == 5


def test_queue_is_first_come_first_served_over_users(site: Site) -> None:
    site.submit("until [ -e gate ]; do sleep 0.02; done", nodes=3, name="first")
    names = ["large", "small", "also"]
    jobs = [
        site.submit("echo $LOCALD_JOB >>order", nodes=nodes, name=name, user=user)
        for name, nodes, user in zip(names, (4, 1, 4), ("grid", "alice", "grid"), strict=True)
    ]
    assert [record["state"] for record in map(site.find, jobs)] == ["queued"] * 3
    (site.cluster.directory / "gate").touch()
    site.wait(jobs[-1])
    order = (site.cluster.directory / "order").read_text().split()
    assert order == [jobs[0]] * 4 + [jobs[1]] + [jobs[2]] * 4


def test_job_environment_names_its_nodes(site: Site) -> None:
    script = 'echo "$LOCALD_JOB $LOCALD_NODES $LOCALD_NODE $LOCALD_NODE_NAME $LOCALD_NODE_INDEX $GREETING"'
    site.submit("exec sleep 60", name="first")
    job = site.submit(script, nodes=2, env={"GREETING": "hello", "LOCALD_NODE": "forged"})
    site.wait(job)
    nodes = "127.0.1.2,127.0.1.3"
    assert sorted(site.output().read_text().splitlines()) == [
        f"{job} {nodes} 127.0.1.2 north-2 0 hello",
        f"{job} {nodes} 127.0.1.3 north-3 1 hello",
    ]


def test_killed_runner_marks_its_running_job_lost(site: Site) -> None:
    job = site.submit("echo $$; if [ $LOCALD_NODE_INDEX = 1 ]; then kill -9 $$; fi; sleep 60", nodes=3)
    wait_for_pids(site, 3)
    record = eventually(lambda: (record := site.find(job))["lost"] and record)
    assert (record["state"], record["reason"]) == ("running", "node north-2: runner killed by signal 9")
    # A node is occupied until all processes of the job have ended.
    assert site.list()["idle"] == 1


def test_killed_locald_leaves_no_processes_to_the_next(site: Site) -> None:
    site.submit(DAEMON + "; echo $$; exec sleep 60")
    orphan, runner = sorted(wait_for_pids(site, 2), key=lambda pid: os.getsid(pid) == pid)
    os.kill(pid_of_locald(site.cluster), signal.SIGKILL)
    eventually(lambda: not is_alive(runner))
    assert is_alive(orphan)
    with connect(site.cluster) as connection:
        assert not is_alive(orphan)
        assert connection.request("list")["idle"] == 4
        assert connection.request("find", name="job") == {"job": None}


def test_attached_jobs_end_with_their_client(site: Site) -> None:
    stays = site.submit("exec sleep 60", name="stays")
    with LocalConnection(site.cluster.directory) as user:
        submitted = [
            user.request("submit", name=f"job-{k}", nodes=3, argv=["sleep", "60"], attached=True)["job"] for k in (1, 2)
        ]
        later_job = site.submit("exec sleep 60", nodes=3, name="after")
        assert [site.find(job)["state"] for job in (*submitted, later_job)] == ["running", "queued", "queued"]
    for job in submitted:
        assert site.wait(job)["reason"] == "its client disconnected"
    eventually(lambda: site.find(later_job)["state"] == "running")
    assert site.find(stays)["state"] == "running"


def test_shutdown_is_rejected_while_used_and_sigterm_leaves_nothing(site: Site) -> None:
    site.submit(DAEMON + "; exec sleep 60", nodes=2)
    pids = wait_for_pids(site, 2)
    site.submit("true", nodes=4, name="waits")
    assert site.connection.request("shutdown") == {"shutdown": False}
    assert all(map(is_alive, pids))
    stop_locald(site.cluster)
    eventually(lambda: not processes_of(site.cluster.directory))
    assert not any(map(is_alive, pids))
    assert not list(site.cluster.directory.glob("locald.s*")) + list(site.cluster.directory.glob("*.json"))


def test_unused_locald_ends(make_site: Callable[..., Site]) -> None:
    site = make_site(linger=0.1)
    locald = pid_of_locald(site.cluster)
    job = site.submit("until [ -e gate ]; do sleep 0.02; done")
    site.connection.close()
    with connect(site.cluster) as again:
        assert (pid_of_locald(site.cluster), again.request("find", job=job)["state"]) == (locald, "running")
    (site.cluster.directory / "gate").touch()
    eventually(lambda: not is_alive(locald))


@pytest.mark.parametrize("event", ["agent connects", "directory is removed"])
def test_locald_with_undelivered_result_keeps_its_key(make_site: Callable[..., Site], event: str) -> None:
    site = make_site(linger=0.1)
    locald = pid_of_locald(site.cluster)
    assert site.connection.request("keep", key="aa")["key"] == "aa"
    assert site.wait(site.submit("exit 1"))["exit_code"] == 1
    site.connection.close()
    ended, _, _ = select.select([os.pidfd_open(locald)], [], [], 0.5)
    assert not ended, "it would have ended five times"
    if event == "agent connects":
        with connect(site.cluster) as agent:
            assert agent.request("keep", key="bb")["key"] == "aa"
            agent.request("list", ended_since=0, ended_prefix="koala-")
    else:
        shutil.rmtree(site.cluster.directory)
    eventually(lambda: not is_alive(locald))


@pytest.mark.evidence("R6")
def test_secret_of_runner_is_only_in_its_pipe(make_site: Callable[..., Site]) -> None:
    site = make_site()
    script = 'cat /dev/fd/"$KOALA_SECRET_PIPE"; tr "\\0" "\\n" </proc/self/environ | grep -c aaaa; exit 0'
    job = site.submit(script, nodes=1, secrets=["aaaa"])
    assert site.wait(job)["exit_code"] == 0
    assert site.output().read_text() == "aaaa0\n"
    assert "aaaa" not in json.dumps(site.list())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", True),
        ("nodes", 5),
        ("nodes", "2"),
        ("argv", []),
        ("argv", ["a\0b"]),
        ("argv", "ls"),
        ("argv", [""]),
        ("env", {"A": 1}),
        ("env", {"A=B": ""}),
        ("env", []),
        ("cwd", "/no/such/folder"),
        ("output", "relative"),
        ("output", "/no/such/folder/file"),
        ("name", ""),
        ("user", None),
        ("secrets", ["aa", "bb"]),
        ("eligible", ["10.0.0.1"]),
        ("name", "\ud800"),
        ("walltime", -1),
        ("walltime", float("nan")),
        ("walltime", "soon"),
        ("walltime", 10**400),
        ("attached", 1),
    ],
)
def test_wrong_submission_names_its_field(site: Site, field: str, value: object) -> None:
    good: dict[str, object] = {"nodes": 1, "argv": ["/bin/true"], "name": "job"}
    with pytest.raises(SiteRejected, match=f"^{field}: "):
        site.connection.request("submit", **{**good, field: value})
    assert site.list()["jobs"] == []


def test_wrong_requests_do_not_crash_locald(site: Site) -> None:
    path = str(site.cluster.directory / SOCKET_NAME)
    lines = [b"{", b"\xff\xfe", b"[1]", b"null", b'"op"', b'{"op": 1}', b'{"op": []}', b'{"op": "eat"}']
    lines += [b"[" * 100_000, b'{"op": "cancel", "job": []}', b'{"op": "wait", "job": {}}', b'{"op": "find"}']
    lines += [b'{"op": "list", "ended_since": "x"}', b'{"op": "keep", "key": {}}']
    lines += [b'{"op": "reserve", "name": "a", "users": ["u"], "begins": 1%b, "ends": 2}' % (b"0" * 400)]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"\n".join(lines) + b"\n")
        with client.makefile("rb") as replies:
            answers = [json.loads(replies.readline()) for _ in lines]
    assert all("error" in reply or reply == {"job": None} for reply in answers)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        with pytest.raises(OSError):
            client.sendall(b"x" * (100 << 20))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b'{"op": "list"}\n' * 1000)
    assert site.list()["total"] == 4


def test_cluster_with_long_directory_and_temporary_directory_runs_jobs(
    make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("deep" * 30) / "north"
    monkeypatch.setenv("TMPDIR", str(directory.parent))  # as a test runner's or a batch job's may be
    site = make_site(directory=directory)
    assert site.wait(site.submit("true"))["exit_code"] == 0
    stop_locald(site.cluster)
    assert not (directory / SOCKET_NAME).exists()


def test_socket_is_private_to_its_account(site: Site) -> None:
    assert (site.cluster.directory / SOCKET_NAME).stat().st_mode & 0o077 == 0


def test_watcher_is_notified_of_changes(site: Site) -> None:
    with LocalConnection(site.cluster.directory) as watcher:
        seq = watcher.request("watch")["seq"]
        site.submit("true")
        assert watcher.receive()["changed"] > seq


PRELOADED = """
import os, resource, signal, sys, time
def main(args):
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = sorted(number for number in listed if os.path.exists(f"/proc/self/fd/{number}"))
    if args[0] == "raise":
        raise ValueError("as asked")
    if args[0] == "exit":
        sys.exit(4)
    if args[0] == "fork":
        if (pid := os.fork()) == 0:
            os.setsid()
            time.sleep(60)
        print(pid)
    if args[0] == "orphan":
        time.sleep(60)
    inherited = {number for number in descriptors if os.get_inheritable(number)}
    others = inherited - {0, 1, 2, int(os.environ["KOALA_LRM_PIPE"])}
    print(*args, sys.argv[1:] == args, os.environ.get("GREETING"), os.getcwd(), others)
    return len(args)
"""


@pytest.fixture
def preloaded(make_site: Callable[..., Site], preloaded_file: Path) -> Site:
    return make_site(preload=preloaded_file)


@pytest.fixture
def preloaded_file(tmp_path: Path) -> Path:
    file = tmp_path / "preloaded.py"
    file.write_text(PRELOADED)
    return file


def run_preloaded(site: Site, *args: str, interpreter: str = "/no/such/python") -> dict[str, object]:
    argv = [interpreter, "-I", "-S", str(site.cluster.preload), *args]
    return site.wait(site.submit("", argv=argv, env={"GREETING": "hello"}))


def test_preloaded_program_runs_without_an_interpreter(preloaded: Site) -> None:
    folder = preloaded.cluster.directory
    for _ in range(2):
        assert run_preloaded(preloaded, "a", "b")["exit_code"] == 2
    line = f"a b True hello {folder} set()\n"
    assert preloaded.output().read_text() == line * 2


def test_fork_of_preloaded_program_ends_with_it(preloaded: Site) -> None:
    assert run_preloaded(preloaded, "fork")["exit_code"] == 1
    (pid,) = numbers_in(preloaded.output())
    assert not is_alive(pid)


def test_fork_of_preloaded_program_ends_with_killed_locald(preloaded: Site) -> None:
    argv = ["python", str(preloaded.cluster.preload), "fork"]
    held = ["python", str(preloaded.cluster.preload), "orphan"]
    preloaded.submit("", argv=held, name="held")
    preloaded.submit("", argv=argv)
    os.kill(pid_of_locald(preloaded.cluster), signal.SIGKILL)
    with connect(preloaded.cluster) as connection:
        assert connection.request("list")["idle"] == 4
    locald = pid_of_locald(preloaded.cluster)
    keeper = int(Path(f"/proc/{locald}/stat").read_text().rpartition(")")[2].split()[1])
    assert {*processes_of(preloaded.cluster.directory)} == {keeper, locald}


def test_changed_preloaded_file_runs_by_exec(preloaded: Site) -> None:
    file = preloaded.cluster.preload
    assert file is not None
    file.write_text("print('changed')")
    python = "/usr/bin/env"
    argv = [python, str(file)]
    record = preloaded.wait(preloaded.submit("", argv=argv))
    # /usr/bin/env rejects a file that is not executable, so it was read anew and not from memory.
    assert record["exit_code"] == 126


def test_second_locald_of_directory_exits(site: Site) -> None:
    locald = pid_of_locald(site.cluster)
    assert subprocess.run(site.cluster.start_command, check=False).returncode == HELD_BY_ANOTHER
    assert pid_of_locald(site.cluster) == locald
