"""Jobs of two users with separate accounts on the testbed's clusters.

North and east have agents that may change their account, south's has rules of sudo. Collected when the testbed is up.
"""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from koalapy.system.tls import Trust
from tests.grid.containers import Container
from tests.grid.grid import MAX_WAIT_S, Gate, NodeProcess, wait_until
from tests.grid.testbed import CLUSTERS, WEST, Testbed

UIDS = {"alice": "1501", "bob": "1502"}
EACH = pytest.mark.parametrize("cluster", CLUSTERS)


class User:
    """A user with a token; ``account`` is the user's account on the clusters."""

    def __init__(self, bed: Testbed, name: str, account: str) -> None:
        self._bed, self.name, self.account = bed, name, account
        token = bed.run_koala("token", "create", "--user", name, "--role", "user", "--expires", "1h", "-q")
        assert token.returncode == 0, token.stderr
        self.token = token.stdout.strip()
        headers = {"Authorization": f"Bearer {self.token}", "X-Requested-With": "koala"}
        verify = Trust(bed.ca_file).create_context()
        self.http = httpx2.Client(base_url=bed.url, timeout=90.0, headers=headers, verify=verify)

    def submit(self, cluster: str, *command: str, size: int = 1, **fields: Any) -> int:
        request = {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}
        body = {"request": request, "command": list(command), "launcher": "processes", **fields}
        answer = self.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def koala(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        environment = self._bed.environment | {"KOALA_URL": self._bed.url, "KOALA_TOKEN": self.token}
        command = [*self._bed.koala_command, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_S, env=environment, **options)


def _identity(container: Container, identity: str) -> None:
    container.run("/opt/testbed/identity", identity)


@pytest.fixture(scope="module")
def bed(testbed: Testbed) -> Iterator[Testbed]:
    """Yield the testbed in the mode in which jobs run as their owners."""
    switched = [testbed.containers["daemon"], testbed.west_head, *testbed.heads.values()]

    def switch(identity: str) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda container: _identity(container, identity), switched))
        testbed.connect(testbed.url)
        wait_until(lambda: all(c["idle"] == c["total"] for c in testbed.list_clusters()), "every node to be idle")

    testbed.wait_until_idle()
    switch("mapped")
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()
    switch("service")


@pytest.fixture(scope="module")
def alice(bed: Testbed) -> User:
    return User(bed, "alice", "alice")


@pytest.fixture(scope="module")
def robert(bed: Testbed) -> User:
    return User(bed, "robert", "bob")


def start_gated_job(bed: Testbed, person: User, cluster: str, size: int = 1) -> tuple[int, Gate]:
    """Start a job of a user that waits for a gate."""
    gate = bed.make_gate()
    ident = person.submit(cluster, *gate.hold, size=size)
    bed.wait_for_state(ident, "running")
    wait_until(lambda: len({p.node for p in bed.list_programs(ident)}) == size, "every rank to run")
    return ident, gate


def finish_job(bed: Testbed, ident: int, gate: Gate) -> None:
    gate.open()
    job = bed.wait_for_end(ident, 120)
    assert (job["state"], job["exit_code"]) == ("succeeded", 0), job


def read_owner(bed: Testbed, process: NodeProcess) -> str:
    return bed.containers[process.node].run("stat", "-c", "%u", f"/proc/{process.pid}").strip()


@pytest.mark.evidence("K1")
@EACH
def test_job_processes_belong_to_job_owner(bed: Testbed, alice: User, robert: User, cluster: str) -> None:
    jobs = {person.account: start_gated_job(bed, person, cluster) for person in (alice, robert)}
    for account, (ident, _) in jobs.items():
        processes = [*bed.list_programs(ident), *bed.list_runners(f"{ident}.")]
        assert {read_owner(bed, process) for process in processes if "slurmstepd" not in process.text} == {
            UIDS[account]
        }
    queue_command = (
        "squeue -h -o %u" if CLUSTERS[cluster][0] == "slurm" else "qstat -u '*' | tail -n +3 | awk '{print $4}'"
    )
    assert sorted(bed.heads[cluster].shell(queue_command).split()) == ["alice", "bob"]
    for ident, gate in jobs.values():
        finish_job(bed, ident, gate)


@contextmanager
def shared_partitions(bed: Testbed, *clusters: str) -> Iterator[None]:
    """Let Slurm share the nodes of clusters while the block runs."""
    heads = [bed.west_head if cluster == WEST else bed.heads[cluster] for cluster in clusters]
    notice = "partition batch has OverSubscribe=EXCLUSIVE"
    wait_until(lambda: all(notice in bed.get_cluster(cluster)["reason"] for cluster in clusters), "notices")
    try:
        for head in heads:
            head.run("scontrol", "update", "PartitionName=batch", "OverSubscribe=NO")
        wait_until(lambda: all(notice not in bed.get_cluster(cluster)["reason"] for cluster in clusters), "no notice")
        yield
    finally:
        for head in heads:
            head.run("scontrol", "update", "PartitionName=batch", "OverSubscribe=EXCLUSIVE")


SHOW_PROCESSORS = "echo $(uname -n) $(grep Cpus_allowed_list /proc/self/status)"


@pytest.mark.evidence("J13")
@pytest.mark.parametrize("cluster", ["south", WEST])
def test_jobs_of_two_users_share_nodes(bed: Testbed, alice: User, robert: User, cluster: str) -> None:
    """South binds processes to the processors of their job, and counts memory; west does neither."""
    with bed.open_west():
        with shared_partitions(bed, cluster):
            gate = bed.make_gate()
            hold = ("sh", "-c", f'{SHOW_PROCESSORS}; exec "$@"', "sh", *gate.hold)
            jobs = [user.submit(cluster, *hold, size=2, share=True, cores=1) for user in (alice, robert)]
            for job in jobs:
                bed.wait_for_state(job, "running")
            hosts = [set(bed.get_job(job)["components"][0]["hosts"]) for job in jobs]
            assert hosts[0] & hosts[1], hosts
            whole = alice.submit(cluster, "true", size=2)
            assert bed.get_job(whole)["state"] == "queued"
        gate.open()
        for job in jobs:
            ended = bed.wait_for_end(job, 120)
            assert (ended["state"], ended["exit_code"], ended["restarts"]) == ("succeeded", 0, 0), ended
        assert bed.wait_for_end(whole, 120)["state"] == "succeeded"
        if cluster == "south":
            lines = [line for job in jobs for line in bed.read_output(job).splitlines() if line != "done"]
            assert sorted(lines) == [f"south-{node} Cpus_allowed_list: {cpu}" for node in (1, 2) for cpu in (0, 1)]


@pytest.mark.evidence("J13")
def test_mpi_job_over_clusters_uses_its_own_processors_of_shared_nodes(bed: Testbed, alice: User, robert: User) -> None:
    sums = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('sum', c.allreduce(c.rank), flush=True)"
    components = [{"size": 2, "cluster": cluster} for cluster in ("south", WEST)]
    with bed.open_west(), shared_partitions(bed, "south", WEST):
        gate = bed.make_gate()
        hold = ("sh", "-c", f'{SHOW_PROCESSORS}; exec "$@"', "sh", *gate.hold)
        others = [alice.submit(cluster, *hold, size=2, share=True, cores=1) for cluster in ("south", WEST)]
        for job in others:
            bed.wait_for_state(job, "running")
        ranks = ("sh", "-c", f'{SHOW_PROCESSORS}; exec python -c "{sums}"')
        request = {"type": "fixed", "components": components}
        job = robert.submit("", *ranks, request=request, launcher="openmpi", share=True, cores=1)
        ended = bed.wait_for_end(job, 120)
        lines = bed.read_output(job).splitlines()
        assert (ended["state"], ended["exit_code"], ended["restarts"]) == ("succeeded", 0, 0), (ended, lines)
        hosts = [{host for c in bed.get_job(each)["components"] for host in c["hosts"]} for each in (*others, job)]
        assert hosts[2] & hosts[0], hosts
        assert hosts[2] & hosts[1], hosts
        gate.open()
        for each in others:
            assert bed.wait_for_end(each, 120)["state"] == "succeeded"
        assert lines.count("sum 6") == 4, lines
        lines += bed.read_output(others[0]).splitlines()
        bound = [line for line in lines if line.startswith("south-")]
        assert sorted(bound) == [f"south-{node} Cpus_allowed_list: {cpu}" for node in (1, 2) for cpu in (0, 1)]


@pytest.mark.evidence("K1")
@EACH
def test_job_environment_equals_login_environment(bed: Testbed, alice: User, cluster: str) -> None:
    # Grid Engine adds a group without a name to each job.
    script = "id -un; id -Gn 2>/dev/null; echo $HOME $USER $LOGNAME; env | grep -cw grid; umask"
    ident = alice.submit(cluster, "sh", "-c", script)
    assert bed.wait_for_end(ident)["state"] == "succeeded"
    user, groups, variables, agents, _ = bed.read_output(ident).splitlines()
    assert (user, variables) == ("alice", "/home/alice alice alice")
    assert {"alice", "people"} <= set(groups.split())
    assert agents == "0"


@pytest.mark.evidence("K2")
@EACH
def test_user_cannot_read_or_signal_jobs_of_others(bed: Testbed, alice: User, robert: User, cluster: str) -> None:
    """Try to signal and read processes from the node of the victim, and from a job on another node."""
    ident, gate = start_gated_job(bed, alice, cluster)
    job = bed.get_job(ident)["components"][0]["lrm_job"]
    victims = [*bed.list_programs(ident), *bed.list_runners(f"{ident}.")]
    ends = {"slurm": f"scancel {job}", "sge": f"qdel {job}"}[CLUSTERS[cluster][0]]
    node = bed.containers[victims[0].node]
    for victim in victims:
        for attempt in (f"kill -9 {victim.pid}", f"cat /proc/{victim.pid}/environ", f"cat /proc/{victim.pid}/mem"):
            assert node.shell(f"{attempt} >/dev/null 2>&1 && echo did", user="bob", check=False) == ""
    base = f"/shared/{cluster}"
    script = (
        f"ls {base}/jobs/alice {base}/grid {base}/jobs; cat {base}/jobs/alice/*/*; "
        f"echo forged > {base}/jobs/alice/result.0.json; rm -rf {base}/jobs/alice; "
        f"mv {base}/jobs/alice {base}/jobs/mine; "
        f"echo '{{}}' > {base}/jobs/agent.json; {ends}"
    )
    attack = robert.submit(cluster, "sh", "-c", f"({script}) 2>/dev/null; true")
    assert bed.wait_for_end(attack)["state"] == "succeeded"
    output = bed.read_output(attack)
    assert "launch" not in output
    assert "alice" not in output.replace("alice's", "")
    assert bed.get_job(ident)["state"] == "running"
    finish_job(bed, ident, gate)


@pytest.mark.evidence("K8")
@EACH
def test_staged_and_collected_files_belong_to_owner(
    bed: Testbed, alice: User, robert: User, cluster: str, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("from alice\n")
    command = "stat -c %U . in.txt; cat in.txt > out.txt; ln -s /etc/shadow shadow; chmod 700 .; cp out.txt second.txt"
    fixed = f"{cluster}:1"
    options = ["--fixed", fixed, "--launcher", "processes", "--stage", "in.txt", "--collect", "*.txt", "--wait"]
    result = alice.koala("submit", *options, "--collect", "shadow", "--", "sh", "-c", command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    ident = max(job["id"] for job in alice.http.get("/api/v1/jobs").json()["jobs"])
    assert bed.read_output(ident).split() == ["alice", "alice"]
    fetched = alice.koala("fetch", str(ident), "--to", str(tmp_path / "back"))
    assert fetched.returncode == 0, fetched.stderr
    results = {path.name: path.read_text() for path in (tmp_path / "back").rglob("*") if path.is_file()}
    assert results == {"in.txt": "from alice\n", "out.txt": "from alice\n", "second.txt": "from alice\n"}
    assert robert.koala("fetch", str(ident), "--to", str(tmp_path / "other")).returncode != 0
    head = bed.heads[cluster]
    wait_until(lambda: not head.shell(f"ls /shared/{cluster}/jobs/alice").split(), "nothing of it to be left")


@pytest.mark.evidence("K3")
@EACH
@pytest.mark.parametrize(
    ("user", "reason"),
    [("ghost", "there is no account ghost on"), ("munge", "is below min_uid"), ("grid", "the agent's own account")],
)
def test_submit_as_system_account_is_rejected(bed: Testbed, cluster: str, user: str, reason: str) -> None:
    ident = User(bed, user, user).submit(cluster, "true")
    job = bed.wait_for_end(ident)
    assert job["state"] == "failed"
    assert reason in job["reason"], job


def test_login_on_head_node_identifies_its_account(bed: Testbed) -> None:
    for cluster in ("north", "east"):
        head = bed.heads[cluster]
        for account, name in (("alice", "alice"), ("bob", "robert")):
            identity = head.run("koala", "whoami", user=account)
            assert name in identity, identity
            head.run(
                "koala",
                "submit",
                "--fixed",
                f"{cluster}:1",
                "--launcher",
                "processes",
                "--wait",
                "--",
                "true",
                user=account,
            )


def test_audit_log_records_actions_of_users(bed: Testbed, alice: User, robert: User) -> None:
    """Entries name the actor, the way of authentication, the address and the outcome, also of rejected actions."""
    head = bed.heads["north"]
    head.run("koala", "logout", user="alice")
    head.run("koala", "whoami", user="alice")
    ident = alice.submit("north", "true")
    assert robert.http.post(f"/api/v1/jobs/{ident}/hold").status_code == 403
    bed.wait_for_end(ident)
    result = bed.run_koala("audit-log", "--json-lines")
    assert result.returncode == 0, result.stderr
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    recorded_actions = {
        (e["actor"], e["how"].partition(" ")[0], e["action"], e["target"], e["outcome"]) for e in entries
    }
    assert ("alice", "token", "submit_job", f"job {ident}", "done") in recorded_actions
    login = next(e for e in entries if (e["actor"], e["action"], e["how"]) == ("alice", "login", "alice on north"))
    assert (login["role"], login["address"], login["outcome"]) == ("user", "cluster north", "done")
    refused = [e for e in entries if e["actor"] == "robert" and e["outcome"] == "refused"]
    assert any(str(ident) in f"{e['target']} {e['detail']}" for e in refused), refused
    secrets = [alice.token, robert.token]
    assert not [secret for secret in secrets if secret in result.stdout]


def test_restarted_agent_removes_remains_of_jobs(bed: Testbed, alice: User) -> None:
    """Runners leave results in folders that only their account can read."""
    for cluster in CLUSTERS:
        ident, gate = start_gated_job(bed, alice, cluster)
        bed.heads[cluster].hold("agent")
        gate.open()
        wait_until(lambda: not bed.list_programs(ident), "the program to end")  # noqa: B023
        bed.heads[cluster].release("agent")
        job = bed.wait_for_end(ident, 120)
        assert (job["state"], job["exit_code"]) == ("succeeded", 0), job
        assert bed.read_output(ident) == "done\n"


@pytest.mark.evidence("K5")
def test_sudo_rules_of_south_allow_listed_commands_only(bed: Testbed) -> None:
    head = bed.heads["south"]
    may: Callable[[str], str] = lambda command: head.shell(  # noqa: E731
        f"sudo -n -u alice -- {command} && echo did", user="grid", check=False
    )
    assert "did" in may("/usr/bin/sbatch --version")
    for command in ("/bin/sh -c id", "/usr/bin/env id", "/opt/koala/bin/python -c 1", "/usr/bin/srun id"):
        assert "did" not in may(command), command
    assert "did" not in head.shell("sudo -n -u root -- /usr/bin/sbatch --version && echo did", user="grid", check=False)
    assert "did" not in may(f"/opt/koala/bin/koala-account-files {shlex.quote('/home/alice')} alice list")
