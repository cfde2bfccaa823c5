"""``koala workload``: generate, run and report workloads against a server."""

import gzip
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.workload.run import line_of
from koalapy.workload.daemon import request_for
from koalapy.workload.plan import Arrival, Workload, nodes_of, workload_lines
from koalapy.workload.run import Progress
from tests.cli.conftest import Koala, Server

GRID = ("--clusters", "north:4,south:4")


def write_workload(path: Path, *commands: list[str], policy: str = "worst-fit") -> str:
    """Write a workload with jobs that all arrive at time 0; return its path."""
    request = {"type": "nonfixed", "components": [{"size": 1}, {"size": 1}]}
    jobs = [
        Arrival(0.0, command[0], {"request": request, "command": command, "policy": policy}) for command in commands
    ]
    path.write_text("\n".join(workload_lines(Workload({"seed": 1}, tuple(jobs)))))
    return str(path)


def test_generate_with_same_seed_gives_same_workload(koala: Koala) -> None:
    results = [koala("workload", "generate", *GRID, "--jobs", "5", "--seed", seed) for seed in ("3", "3", "4")]
    assert results[0].code == 0
    assert results[0].out == results[1].out != results[2].out
    assert len(results[0].out.splitlines()) == 6
    assert "5 jobs over" in results[0].err


def test_generate_without_clusters_uses_grid_of_daemon(koala: Koala) -> None:
    header = json.loads(koala("workload", "generate", "--preset", "s10-vi", "--jobs", "3").out.splitlines()[0])
    assert header["grid"] == {"north": 4, "south": 4}
    assert header["preset"] == "s10-vi"


def test_generate_applies_every_option(koala: Koala, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    result = koala(
        "workload",
        "generate",
        *GRID,
        "-o",
        str(file),
        "--duration",
        "100",
        "--rate",
        "0.5",
        "--sizes",
        "2,4",
        "--components",
        "2",
        "--least",
        "1",
        "--policy",
        "worst-fit",
        "--priorities",
        "high:1,low:2",
        "--applications",
        "wave:2,sleep",
        "--arguments",
        "wave=--steps 7",
        "--estimate",
        "wave=3",
        "--run-times",
        "1-2",
        "--inputs",
        "a,b",
        "--scale",
        "0.5",
        "--compress",
        "2",
        "--field",
        "processes_per_node=2",
        "--field",
        "claiming=incremental",
    )
    assert result.code == 0, result.err
    jobs = [json.loads(line)["job"] for line in file.read_text().splitlines()[1:]]
    assert 20 < len(jobs) < 90
    assert {nodes_of(job) for job in jobs} == {1, 2}
    assert all(job["claiming"] == "incremental" for job in jobs)
    assert all(("processes_per_node" in job) == (job["launcher"] == "openmpi") for job in jobs)
    assert {job.get("processes_per_node", 2) for job in jobs} == {2}
    assert {job["inputs"][0]["file"] for job in jobs} == {"a", "b"}
    waves = [job["command"] for job in jobs if "sleep" not in job["command"]]
    assert {tuple(command[-2:]) for command in waves} == {("--steps", "7")}
    assert all(0.5 <= float(job["command"][1]) <= 1 for job in jobs if job["command"][0] == "sleep")


def test_generate_with_date_as_field_is_rejected(koala: Koala) -> None:
    result = koala("workload", "generate", *GRID, "--field", "begin=2026-12-01")
    assert (result.code, result.err.startswith("koala: --field is 'begin=2026-12-01', which JSON")) == (2, True)
    assert """in quotes: --field 'begin="2026-12-01"'""" in result.err


def test_generate_from_trace_omits_zero_run_times(koala: Koala, tmp_path: Path) -> None:
    trace = tmp_path / "t.swf.gz"
    row = "{} {} -1 60 4 -1 -1 4 -1 -1 1 1 1 -1 1 -1 -1 -1\n"
    zero = row.replace("60", "0").format(3, 900)
    trace.write_bytes(gzip.compress(("; MaxProcs: 8\n" + row.format(1, 0) + row.format(2, 600) + zero).encode()))
    options = ("--swf", str(trace), "--compress", "60", "--policy", "cluster-minimization")
    result = koala("workload", "generate", *GRID, *options)
    jobs = [json.loads(line) for line in result.out.splitlines()[1:]]
    assert [(j["at"], nodes_of(j["job"]), j["job"]["command"]) for j in jobs] == [
        (0.0, 4, ["sleep", "1.000"]),
        (10.0, 4, ["sleep", "1.000"]),
    ]
    left_out = f"koala: of {trace} jobs are left out: 1 of run time 0; --keep-zero keeps those of run time 0\n"
    assert result.err.endswith(left_out)
    with_zero = koala("workload", "generate", *GRID, *options, "--keep-zero")
    assert (len(with_zero.out.splitlines()), "left out" in with_zero.err) == (1 + 3, False)


def test_generate_without_daemon_needs_clusters(koala: Koala) -> None:
    away = ("--url", "http://127.0.0.1:9")
    result = koala("workload", "generate", *away)
    assert (result.code, "--clusters north:4,south:4" in result.err) == (5, True)
    assert koala("workload", "generate", *away, "--rate", "1", "--scale", "1", "--jobs", "2").code == 0


def test_run_writes_report_of_submitted_jobs(koala: Koala, server: Server, tmp_path: Path) -> None:
    file = write_workload(tmp_path / "w.jsonl", ["echo", "a"], ["echo", "b"])
    result = koala("workload", "run", file)
    assert result.code == 0, result.err
    folder = tmp_path / "w.jsonl.report"
    report = json.loads((folder / "report.json").read_text())
    assert [job["id"] for job in report["jobs"]] == sorted(server.service.records)
    assert report["summary"]["states"] == {"succeeded": 2}
    assert {job.spec.owner for job in server.service.records.values()} == {"ada"}
    assert result.out == (folder / "report.md").read_text()
    again = koala("workload", "run", file)
    assert (again.code, "already has a report" in again.err) == (2, True)
    as_json = koala("workload", "run", file, "--overwrite", "--json")
    assert json.loads(as_json.out)["summary"]["ran"] == 2


def test_run_with_failed_job_exits_with_1(koala: Koala, tmp_path: Path) -> None:
    result = koala("workload", "run", write_workload(tmp_path / "w", ["exit", "3"], ["echo", "a"]))
    assert result.code == 1
    assert "1 failed, 1 succeeded" in result.out


def test_run_submits_jobs_for_owners_of_workload(koala: Koala, server: Server, tmp_path: Path) -> None:
    file = write_workload(tmp_path / "w", ["echo", "a"])
    text = Path(file).read_text().replace('"command"', '"owner": "grace", "command"')
    Path(file).write_text(text)
    assert koala("workload", "run", file).code == 0
    assert {job.spec.owner for job in server.service.records.values()} == {"grace"}


def test_run_with_policy_converts_requests(koala: Koala, server: Server, tmp_path: Path) -> None:
    file = write_workload(tmp_path / "w", ["echo", "a"])
    assert koala("workload", "run", file, "--policy", "cluster-minimization").code == 0
    (job,) = server.service.records.values()
    assert (job.spec.policy, job.spec.request.type, job.spec.request.total_size) == (
        "cluster-minimization",
        "flexible",
        2,
    )


def test_run_with_rejected_background_submits_nothing(koala: Koala, server: Server, tmp_path: Path) -> None:
    result = koala("workload", "run", write_workload(tmp_path / "w", ["echo", "a"]), "--background", "0.2")
    assert result.code in (3, 4)
    assert server.service.records == {}


def test_report_shows_run_and_compares_several(koala: Koala, tmp_path: Path) -> None:
    folders = []
    for policy in ("worst-fit", "cluster-minimization"):
        folders.append(str(tmp_path / policy))
        file = write_workload(tmp_path / f"{policy}.jsonl", ["echo", "a"], policy="worst-fit")
        options = ("--policy", policy, "--directory", folders[-1])
        assert koala("workload", "run", file, *options).code == 0
    single = koala("workload", "report", folders[0])
    assert single.out.startswith("# Workload run: worst-fit")
    assert sorted(path.name for path in (tmp_path / "worst-fit").iterdir()) == ["report.json", "report.md"]
    written = koala("workload", "report", folders[0], "-o", str(tmp_path / "written"))
    assert written.out == single.out == (tmp_path / "written" / "report.md").read_text()
    compared = koala("workload", "report", *folders, "-o", str(tmp_path / "both"))
    assert compared.code == 0, compared.err
    assert "| cluster-minimization |" in compared.out
    comparison = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [run["label"] for run in comparison["runs"]] == ["worst-fit", "cluster-minimization"]
    assert json.loads(koala("workload", "report", *folders, "--json").out) == comparison


def test_report_of_invalid_file_is_rejected(koala: Koala, tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "report.json").write_text(text)
        assert koala("workload", "report", str(tmp_path)).code == 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["worst-fit", "cluster-minimization", "x"]))
def test_request_for_policy_keeps_number_of_nodes(sizes: list[int], policy: str) -> None:
    for request in (
        {"type": "nonfixed", "components": [{"size": size} for size in sizes]},
        {"type": "flexible", "total_size": sum(sizes)},
    ):
        changed = request_for(policy, request)
        assert nodes_of({"request": changed}) == sum(sizes)
        assert changed["type"] == {"worst-fit": "nonfixed", "cluster-minimization": "flexible"}.get(
            policy, request["type"]
        )
        assert all(component["size"] >= 1 for component in changed.get("components", ()))


def test_line_of_run_progress() -> None:
    progress = Progress(seconds=63.2, jobs=30, submitted=12, total=8, ours=5, background=2, mean_background=0.19)
    progress.states.update(["running", "running", "queued"])
    progress.ended.update(["succeeded", "failed", "succeeded"])
    assert line_of(progress) == (
        "   63 s · 12/30 submitted · 1 wait, 2 run, 1 failed, 2 succeeded · nodes: 5 jobs, 2 background, 1 idle of 8"
        " · background 19% so far"
    )
