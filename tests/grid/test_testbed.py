"""Behaviour of real resource managers: queues, killed services, drained nodes, network failures.

Collected when the testbed is up (``make testbed``).
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.grid import containers
from tests.grid.grid import Gate, wait_until
from tests.grid.testbed import ADDRESSES, Testbed

FLEXIBLE_8 = {"type": "flexible", "total_size": 8}


@pytest.fixture
def bed(testbed: Testbed) -> Iterator[Testbed]:
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()


def fixed_request(cluster: str, size: int) -> dict[str, Any]:
    return {"type": "fixed", "components": [{"size": size, "cluster": cluster}]}


def start_job(bed: Testbed, gate: Gate, request: dict[str, Any] = FLEXIBLE_8, launcher: str = "openmpi") -> int:
    """Start a job of ranks that wait for the gate, by default on all nodes."""
    size = request.get("total_size") or sum(component["size"] for component in request["components"])
    return bed.start_gated_job(gate, request, size, launcher=launcher)


def test_resource_managers_list_their_components_as_running(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    for cluster in ("north", "south"):
        rows = bed.heads[cluster].run("squeue", "-h", "-o", "%j %T %D", user="alice").split()
        assert f"-{_token(bed, ident, cluster)}." in rows[0]
        assert rows[1:] == ["RUNNING", str(bed.nodes[cluster])]
    listing = bed.heads["east"].run("qstat", "-u", "*", "-r", "-s", "r", user="alice")
    assert f"-{_token(bed, ident, 'east')}." in listing
    bed.finish_gated_job(ident, gate)


def _token(bed: Testbed, ident: int, cluster: str) -> str:
    """Return the component token without its nonce, which is secret."""
    (index,) = [i for i, c in enumerate(bed.get_job(ident)["components"]) if c["cluster"] == cluster]
    return f"{ident}.{bed.get_job(ident)['generation']}.{index}"


@pytest.mark.evidence("R6")
@pytest.mark.parametrize("cluster", ["north", "east"])
def test_runner_secret_is_found_in_no_file_or_process(bed: Testbed, cluster: str) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate, fixed_request(cluster, 2), "processes")
    processes = bed.list_processes()
    assert not [p for p in processes if any("SECRET" in name for name in p.environment)]
    spools = {r.environment["KOALA_SPOOL"] for r in bed.list_runners(f"{ident}.")}
    head = bed.heads[cluster]
    assert spools
    for spool in spools:
        assert "secret" not in head.shell(f"ls {spool}; cat {spool}/launch")
    books = {
        "north": "scontrol show job -dd; scontrol write batch_script $(squeue -h -o %i) -; squeue --json; ps axeww",
        "east": "qstat -j '*'; qstat -u '*' -r -xml; ps axeww",
    }[cluster]
    assert "SECRET" not in head.shell(books, check=False)
    bed.finish_gated_job(ident, gate)


# Drained nodes


@contextmanager
def drained_node(bed: Testbed, cluster: str) -> Iterator[None]:
    head, node = bed.heads[cluster], f"{cluster}-1"
    if cluster == "east":
        head.run("qmod", "-d", f"all.q@{node}", user="sgeadmin")
        back: Callable[[], str] = lambda: head.run("qmod", "-e", f"all.q@{node}", user="sgeadmin")  # noqa: E731
    else:
        head.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        back = lambda: head.run("scontrol", "update", f"nodename={node}", "state=resume")  # noqa: E731
    try:
        yield
    finally:
        back()


@pytest.mark.parametrize("cluster", ["north", "east"])
def test_placement_avoids_drained_node(bed: Testbed, cluster: str) -> None:
    with drained_node(bed, cluster):
        wait_until(lambda: bed.get_cluster(cluster)["down"] == 1, "the drain to be seen")
        assert bed.get_cluster(cluster)["idle"] == 2
        ident = bed.submit({"type": "flexible", "total_size": 7}, "sh", "-c", "echo $KOALA_NODE")
        assert bed.wait_for_end(ident)["state"] == "succeeded"
        assert f"{cluster}-1" not in bed.read_output(ident)
    wait_until(lambda: bed.get_cluster(cluster)["idle"] == 3, "the node to be back")


# South binds processes to processors, and gives little memory to jobs that request none


def test_program_gets_whole_nodes(bed: Testbed) -> None:
    """Slurm checks memory each second; jobs that request none get 80 MB there."""
    hold = "import os, time; held = bytearray(os.urandom(1 << 20) * 300); time.sleep(2.5)"
    look = f"{hold}; print('processors', len(os.sched_getaffinity(0)), flush=True)"
    job = bed.wait_for_end(bed.submit(fixed_request("south", 2), "python", "-c", look, launcher="openmpi"))
    assert (job["state"], job["restarts"]) == ("succeeded", 0), job
    processors = bed.heads["south"].run("nproc").strip()
    assert bed.read_output(job["id"]).split() == ["processors", processors] * 2


def test_program_over_memory_limit_of_slurm_fails_without_error_of_cluster(bed: Testbed) -> None:
    """With OverMemoryKill Slurm ends a job with 137, as if it was killed by a fault of the cluster."""
    fill = "import time; held = bytearray(6000 * 1000 * 1000); held[::4096] = b'x' * len(held[::4096]); time.sleep(10)"
    ident = bed.submit(fixed_request("south", 1), "python", "-c", fill, launcher="processes", max_restarts=3)
    job = bed.wait_for_end(ident, 120)
    assert (job["state"], job["restarts"]) == ("failed", 0), job
    assert job["reason"].startswith("south: memory limit exceeded: slurmstepd"), job["reason"]
    assert bed.get_cluster("south")["errors"] == 0


def test_nodes_without_required_feature_are_excluded(bed: Testbed) -> None:
    setting = "KOALA_CLUSTERS__SOUTH__NATIVE_SPECIFICATION=--constraint=quick"
    out = bed.heads["south"].run("sh", "-c", documented_check("clusters", "south", setting), check=False)
    [nodes] = [f["found"] for f in json.loads(out)["findings"] if f["what"] == "nodes"]
    assert nodes.startswith("1, "), nodes


# Killed services


SERVICES = [
    ("north", "north-1", "slurmd"),
    ("east", "east-1", "execd"),
    ("north", "north-head", "slurmctld"),
    ("east", "east-head", "qmaster"),
]


@contextmanager
def stopped_service(bed: Testbed, service_host: str, service: str) -> Iterator[None]:
    """Kill a service, and prevent its restart while the block runs."""
    if service == "slurmctld":
        # Slurm saves its state some seconds later. A controller killed before that restarts its newest jobs, and
        # considers those that have just ended as running.
        wait_until(lambda: _has_saved(bed.containers[service_host]), "Slurm to save which jobs run")
    if service == "qmaster":
        # Grid Engine cannot continue a job that was being sent to a node.
        states = "qstat -u '*' | awk 'NR > 2 { print $5 }'"
        wait_until(
            lambda: set(bed.containers[service_host].shell(states).split()) <= {"r"}, "Grid Engine to see it run"
        )
    bed.containers[service_host].hold(service)
    try:
        yield
    finally:
        bed.containers[service_host].release(service)
    if service == "qmaster":
        # Execution daemons of Grid Engine 8.1.9 report no ended job to a new qmaster until they are restarted, too.
        wait_until(lambda: "all.q" in bed.heads["east"].shell("qstat -f", check=False), "the qmaster to answer")
        for node in ("east-1", "east-2", "east-3"):
            bed.containers[node].kill("execd")
        wait_until(lambda: _has_idle_nodes(bed), "Grid Engine's daemons to find each other", 120)


def _has_saved(head: containers.Container) -> bool:
    """Tell whether the saved state is newer than every start and end of a job, also of ended jobs.

    With equal seconds it may be older, but Slurm saves any change within some seconds.
    """
    times = "squeue -h -t all -o '%S %e' | tr ' ' '\\n' | grep T | date -f - +%s"  # a time that is not known is N/A
    saved, now, *changes = head.shell(f"stat -c %Y /var/spool/slurmctld/job_state; date +%s; {times}").split()
    latest = max((int(changed_at) for changed_at in changes if int(changed_at) <= int(now)), default=0)
    return int(saved) > latest or (int(saved) == latest and int(now) > latest + 10)


def _has_idle_nodes(bed: Testbed) -> bool:
    rows = [row.split() for row in bed.heads["east"].shell("qstat -f | grep all.q@", check=False).splitlines()]
    return len(rows) == 3 and all(len(row) == 5 for row in rows)


@pytest.mark.parametrize(("cluster", "service_host", "service"), SERVICES)
def test_running_job_survives_restarted_service(bed: Testbed, cluster: str, service_host: str, service: str) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    with stopped_service(bed, service_host, service):
        if service_host.endswith("head"):
            wait_until(lambda: bed.get_cluster(cluster)["reason"], "the cluster's page to tell")
        assert bed.get_job(ident)["state"] == "running"
    bed.finish_gated_job(ident, gate)
    wait_until(lambda: not bed.get_cluster(cluster)["reason"], "the cluster to be well again")


@pytest.mark.nightly
def test_grid_engine_frees_nodes_of_ended_jobs_after_a_qmaster_restart(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate, fixed_request("east", 2), launcher="processes")
    bed.heads["east"].kill("qmaster")
    wait_until(lambda: "all.q" in bed.heads["east"].shell("qstat -f", check=False), "the qmaster to answer")
    bed.finish_gated_job(ident, gate)
    wait_until(
        lambda: bed.get_cluster("east")["idle"] == 3 and not bed.get_cluster("east")["reason"],
        "all nodes to be idle",
        300,
    )


def test_job_on_node_lost_by_slurm_is_restarted(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    with stopped_service(bed, "north-1", "slurmd"):
        wait_until(lambda: bed.get_job(ident)["restarts"] == 1, "Slurm to give the node up", 120)
        wait_until(lambda: not bed.list_programs(ident), "every program to be ended, also where slurmd is dead")
        wait_until(lambda: bed.get_cluster("north")["down"] == 1, "the node to be seen as down")
    bed.finish_gated_job(ident, gate, restarts=1)


def test_job_survives_unreachable_execution_daemon(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    with stopped_service(bed, "east-1", "execd"):
        head = bed.heads["east"]
        wait_until(
            lambda: "u" in head.shell("qstat -f -q '*@east-1' | grep @east-1").split()[-1], "it to be missed", 120
        )
        assert bed.get_job(ident)["state"] == "running"
    bed.finish_gated_job(ident, gate)


@pytest.mark.parametrize(("cluster", "service_host", "service"), SERVICES[:3])
def test_job_cancelled_without_service_leaves_nothing(
    bed: Testbed, cluster: str, service_host: str, service: str
) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    with stopped_service(bed, service_host, service):
        bed.cancel(ident)
        wait_until(
            lambda: not bed.list_programs(ident), "the programs to end though the resource manager cannot end them"
        )
    assert bed.wait_for_end(ident, 90)["state"] == "cancelled"


def test_clusters_work_while_one_lacks_resource_manager(bed: Testbed) -> None:
    with stopped_service(bed, "south-head", "slurmctld"):
        wait_until(lambda: bed.get_cluster("south")["reason"], "the cluster's page to tell")
        job = bed.wait_for_end(bed.submit({"type": "flexible", "total_size": 6}, "true"))
        assert {c["cluster"] for c in job["components"]} == {"north", "east"}
    wait_until(lambda: not bed.get_cluster("south")["reason"], "the cluster to be well again")


# Resource managers that hang, reject jobs or keep ended ones


@contextmanager
def suspended_program(bed: Testbed, service_host: str, program: str) -> Iterator[None]:
    """Suspend a program while the block runs."""
    container = bed.containers[service_host]
    container.shell(f"kill -STOP $(pidof {program})")
    try:
        yield
    finally:
        container.shell(f"kill -CONT $(pidof {program})")


HANGING = [("south", "south-head", "slurmctld"), ("east", "east-head", "sge_qmaster")]


@pytest.mark.parametrize(("cluster", "service_host", "program"), HANGING)
def test_hanging_resource_manager_is_reported_and_gets_no_job(
    bed: Testbed, cluster: str, service_host: str, program: str
) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    with suspended_program(bed, service_host, program):
        wait_until(
            lambda: bed.get_cluster(cluster)["reason"].startswith("not answering since "), "the hang to be reported"
        )
        assert bed.get_cluster(cluster)["state"] == "unreachable"
        assert bed.get_job(ident)["state"] == "running", "what runs there runs on"
    wait_until(lambda: not bed.get_cluster(cluster)["reason"], "the cluster to be well again")
    bed.finish_gated_job(ident, gate)


def test_submission_during_slurm_hang_creates_one_job(bed: Testbed) -> None:
    with suspended_program(bed, "south-head", "slurmctld"):
        ident = bed.submit(fixed_request("south", 1), "true")
        wait_until(
            lambda: bed.get_cluster("south")["reason"].startswith("not answering since "), "the hang to be reported"
        )
    job = bed.wait_for_end(ident)
    assert (job["state"], job["restarts"]) == ("succeeded", 0)
    names = bed.heads["south"].shell("squeue --states=all --noheader --format=%j").split()
    assert sum(f"-{ident}.1.0." in name for name in names) == 1


@pytest.mark.parametrize("cluster", ["north", "south"])
def test_job_with_walltime_over_slurm_limit_fails(bed: Testbed, cluster: str) -> None:
    head = bed.heads[cluster]
    head.shell("scontrol update PartitionName=batch MaxTime=10")
    try:
        for _ in range(4):
            job = bed.wait_for_end(bed.submit(fixed_request(cluster, 1), "true", walltime=3600))
            assert (job["state"], job["restarts"]) == ("failed", 0)
            assert f"refused it: {cluster}: Slurm will not start it: PartitionTimeLimit" in job["reason"]
        assert bed.get_cluster(cluster)["errors"] == 0
        assert bed.wait_for_end(bed.submit(fixed_request(cluster, 1), "true", walltime=300))["state"] == "succeeded"
    finally:
        head.shell("scontrol update PartitionName=batch MaxTime=INFINITE")


def test_job_stuck_in_grid_engine_is_reported_until_freed(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate, fixed_request("east", 3), launcher="processes")
    for service_host in ("east-head", "east-1", "east-2", "east-3"):
        bed.containers[service_host].shell("kill -9 $(pidof sge_qmaster sge_execd)")
    bed.cancel(ident)
    wait_until(
        lambda: bed.get_job(ident)["state"] == "cancelled" or "still holds" in bed.get_cluster("east")["reason"],
        "the job to be cancelled or reported",
        60,
    )
    cluster = bed.get_cluster("east")
    assert cluster["used"] + cluster["background"] + cluster["idle"] + cluster["down"] == cluster["total"]
    assert bed.wait_for_end(ident, 240)["state"] == "cancelled"
    wait_until(
        lambda: bed.get_cluster("east")["idle"] == 3 and not bed.get_cluster("east")["reason"],
        "all to be well again",
        120,
    )


# Networks


@contextmanager
def disconnected(bed: Testbed, service: str) -> Iterator[None]:
    container = bed.containers[service]
    containers.change_network("disconnect", container)
    try:
        yield
    finally:
        containers.change_network("connect", container, ADDRESSES[service])


def test_disconnected_agents_keep_jobs_running(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate)
    clusters = ("south", "east")
    with disconnected(bed, "south-head"), disconnected(bed, "east-head"):
        for cluster in clusters:
            wait_until(lambda: bed.get_cluster(cluster)["state"] == "unreachable", "the loss to be noticed", 120)  # noqa: B023
        assert len(bed.list_programs(ident)) == 8
    for cluster in clusters:
        wait_until(lambda: bed.get_cluster(cluster)["state"] == "usable", "the agents to be back", 120)  # noqa: B023
    bed.finish_gated_job(ident, gate)


def test_job_ending_while_agent_is_disconnected_succeeds(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate, launcher="processes")
    with disconnected(bed, "south-head"):
        gate.open()
        wait_until(lambda: not bed.list_programs(ident), "the programs to end")
    assert bed.wait_for_end(ident, 120)["state"] == "succeeded"
    assert bed.read_output(ident).count("done") == 8


def test_unreachable_nodes_are_named_in_reason(bed: Testbed) -> None:
    node = bed.containers["south-1"]
    node.shell("ip route add blackhole 198.18.0.31/32")
    try:
        ident = bed.submit(
            {"type": "fixed", "components": [{"size": 2, "cluster": "south"}, {"size": 3, "cluster": "east"}]},
            "true",
            launcher="openmpi",
            links="direct",
            max_restarts=0,
        )
        job = bed.wait_for_end(ident, 90)
    finally:
        node.shell("ip route del blackhole 198.18.0.31/32")
    assert job["state"] == "failed"
    assert "south-1" in job["reason"]
    assert "east-1" in job["reason"]
    # Either of the two may notice the other first; the port is of that cluster's range.
    assert re.search(r" at 198\.18\.0\.(31:22|21:21)\d{3} ", job["reason"]), job["reason"]
    for cluster in ("south", "east"):
        bed.run_koala("clusters", "clear", cluster)


# Profiles


def test_cluster_profile_variables_reach_the_command(bed: Testbed) -> None:
    ident = bed.submit(FLEXIBLE_8, "sh", "-c", 'echo "$0" "$1" "$2"', "{cluster}", "{scratch}/{job}", "{home}")
    assert bed.wait_for_end(ident)["state"] == "succeeded"
    assert sorted(set(bed.read_output(ident).splitlines())) == [
        f"{name} /scratch/{ident} /shared/{name}/home/koala" for name in ("east", "north", "south")
    ]


def test_ranks_communicate_over_network_of_profile(bed: Testbed) -> None:
    program = (
        "import os; from mpi4py import MPI; w = MPI.COMM_WORLD; "
        "print(w.rank, os.environ['OMPI_MCA_btl_tcp_if_include'], flush=True); w.Barrier()"
    )
    ident = bed.submit(FLEXIBLE_8, "python", "-c", program, launcher="openmpi")
    assert bed.wait_for_end(ident)["state"] == "succeeded", bed.read_output(ident)
    assert sorted(bed.read_output(ident).splitlines()) == [f"{rank} 198.18.0.0/24" for rank in range(8)]


# Checks and database


@pytest.mark.parametrize("page", ["clusters", "operating"])
@pytest.mark.parametrize("cluster", ["north", "south", "east", "west"])
def test_documented_check_of_healthy_cluster_passes(bed: Testbed, cluster: str, page: str) -> None:
    report = json.loads(bed.containers[f"{cluster}-head"].run("sh", "-c", documented_check(page, cluster)))
    assert [f for f in report["findings"] if not f["ok"]] == []


@pytest.mark.parametrize(
    ("cluster", "setting", "value", "says"),
    [
        ("north", "PARTITION", "nosuch", "nosuch"),
        ("east", "QUEUE", "nosuch.q", "nosuch.q"),
        ("east", "PARALLEL_ENVIRONMENT", "nosuch", "nosuch"),
        ("east", "LIBRARY", "/no/such/lib.so", "/no/such/lib.so"),
        ("south", "MPI__SERIES", "4", "series"),
    ],
)
def test_check_of_misconfigured_cluster_names_remedy(
    bed: Testbed, cluster: str, setting: str, value: str, says: str
) -> None:
    wrong = f"KOALA_CLUSTERS__{cluster.upper()}__{setting}={value}"
    out = bed.heads[cluster].run("sh", "-c", documented_check("clusters", cluster, wrong), check=False)
    bad = [f for f in json.loads(out)["findings"] if not f["ok"]]
    assert bad
    assert all(f["hint"] for f in bad)
    assert says in str(bad)


def documented_check(page: str, cluster: str, setting: str = "") -> str:
    """Return the command of a page that checks a cluster, with a setting and with JSON as output."""
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    match = re.search(r"(sudo -u koala -H sh -c '.*; )(\S*koala check )north'", text)
    assert match is not None
    return f"{match[1]}{setting} {match[2]}{cluster} --json'"


def test_daemon_stores_jobs_in_postgresql(bed: Testbed) -> None:
    psql = "PGPASSWORD=$(cat /secrets/database-password) psql -h 127.0.0.1 -U postgres -At koala"
    command = f"{psql} -c 'select count(*) from jobs'"
    job_count = int(bed.containers["database"].shell(command))
    bed.wait_for_end(bed.submit({"type": "flexible", "total_size": 1}, "true"))
    assert int(bed.containers["database"].shell(command)) == job_count + 1


def test_running_jobs_survive_database_restart(bed: Testbed) -> None:
    gate = bed.make_gate()
    ident = start_job(bed, gate, fixed_request("north", 2), "processes")
    bed.containers["database"].kill("postgres")

    def answers(path: str) -> bool:
        try:
            return bed.http.get(path).status_code == 200
        except httpx2.HTTPError:
            return False

    wait_until(lambda: answers(f"/api/v1/jobs/{ident}"), "the daemon to answer again")
    bed.finish_gated_job(ident, gate)
    # The daemon rejects changes until its next check of the database.
    wait_until(lambda: answers("/readyz"), "the daemon to take changes again")
