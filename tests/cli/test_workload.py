"""``koala workload``: what is made, what is run against a server, and what is told of it."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.cli.workload.run import line_of, request_for
from koalapy.workload.plan import Arrival, Workload, nodes_of, workload_lines
from koalapy.workload.run import Progress
from tests.cli.conftest import Koala, Server

GRID = ("--clusters", "north:4,south:4")


def written(path: Path, *commands: list[str], policy: str = "worst-fit") -> str:
    """A workload whose jobs arrive at once."""
    request = {"type": "nonfixed", "components": [{"size": 1}, {"size": 1}]}
    jobs = [Arrival(0.0, words[0], {"request": request, "command": words, "policy": policy}) for words in commands]
    path.write_text("\n".join(workload_lines(Workload({"seed": 1}, tuple(jobs)))))
    return str(path)


def test_the_same_seed_gives_the_same_output(koala: Koala) -> None:
    made = [koala("workload", "generate", *GRID, "--jobs", "5", "--seed", seed) for seed in ("3", "3", "4")]
    assert made[0].code == 0
    assert made[0].out == made[1].out != made[2].out
    assert len(made[0].out.splitlines()) == 6
    assert "5 jobs over" in made[0].err


def test_the_grid_is_the_daemons_where_none_is_given(koala: Koala) -> None:
    header = json.loads(koala("workload", "generate", "--preset", "s10-vi", "--jobs", "3").out.splitlines()[0])
    assert header["grid"] == {"north": 4, "south": 4}
    assert header["preset"] == "s10-vi"


def test_every_option_is_heard(koala: Koala, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    done = koala(
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
    assert done.code == 0, done.err
    jobs = [json.loads(line)["job"] for line in file.read_text().splitlines()[1:]]
    assert 20 < len(jobs) < 90
    assert {nodes_of(job) for job in jobs} == {1, 2}
    assert all(job["claiming"] == "incremental" for job in jobs)
    assert all(("processes_per_node" in job) == (job["launcher"] == "openmpi") for job in jobs)
    assert {job.get("processes_per_node", 2) for job in jobs} == {2}
    assert {job["inputs"][0]["file"] for job in jobs} == {"a", "b"}
    waves = [job["command"] for job in jobs if "sleep" not in job["command"]]
    assert {tuple(words[-2:]) for words in waves} == {("--steps", "7")}
    assert all(0.5 <= float(job["command"][1]) <= 1 for job in jobs if job["command"][0] == "sleep")


def test_a_trace_is_read(koala: Koala, tmp_path: Path) -> None:
    trace = tmp_path / "t.swf.gz"
    row = "{} {} -1 60 4 -1 -1 4 -1 -1 1 1 1 -1 1 -1 -1 -1\n"
    zero = row.replace("60", "0").format(3, 900)
    trace.write_bytes(gzip.compress(("; MaxProcs: 8\n" + row.format(1, 0) + row.format(2, 600) + zero).encode()))
    options = ("--swf", str(trace), "--compress", "60", "--policy", "cluster-minimization")
    done = koala("workload", "generate", *GRID, *options)
    jobs = [json.loads(line) for line in done.out.splitlines()[1:]]
    assert [(j["at"], nodes_of(j["job"]), j["job"]["command"]) for j in jobs] == [
        (0.0, 4, ["sleep", "1.000"]),
        (10.0, 4, ["sleep", "1.000"]),
    ]
    left_out = f"koala: of {trace} jobs are left out: 1 of run time 0; --keep-zero keeps those of run time 0\n"
    assert done.err.endswith(left_out)
    kept = koala("workload", "generate", *GRID, *options, "--keep-zero")
    assert (len(kept.out.splitlines()), "left out" in kept.err) == (1 + 3, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--preset", "x"), "known: m05, s10-vi, s10-vii"),
        (("--sizes", "a"), "--sizes is 'a'"),
        (("--sizes", "9", "--components", "1"), "could never run"),
        (("--clusters", "north"), "--clusters is 'north'"),
        (("--clusters", "north:0"), "--clusters is 'north:0'"),
        (("--swf", "/nowhere"), "cannot read /nowhere: No such file"),
        (("--swf", "x", "--rate", "1"), "--swf defines the arrivals"),
        (("--applications", "x"), "--applications is 'x'"),
        (("--applications", "wave:x"), "'x' is not a number"),
        (("--arguments", "wave"), "--arguments is 'wave'"),
        (("--arguments", "wave='a"), "quote as for a shell"),
        (("--estimate", "wave=x"), "'x' is not a number"),
        (("--run-times", "5-1"), "--run-times is '5-1'"),
        (("--inputs", "a,,b"), "--inputs is"),
        (("--field", "x"), "--field is 'x'"),
        (("--field", "x={"), "in YAML or JSON"),
        (("--request", "fixed"), "--request is 'fixed'"),
        (("--rate", "0"), "--rate is 0"),
        (("-o", "/nowhere/x"), "cannot write /nowhere/x"),
    ],
)
def test_a_wrong_option_is_named_with_the_way_out(koala: Koala, options: tuple[str, ...], said: str) -> None:
    done = koala("workload", "generate", *GRID, *options)
    assert done.code == 2, done.err
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


def test_without_a_daemon_the_grid_has_to_be_given(koala: Koala) -> None:
    away = ("--url", "http://127.0.0.1:9")
    done = koala("workload", "generate", *away)
    assert (done.code, "--clusters north:4,south:4" in done.err) == (5, True)
    assert koala("workload", "generate", *away, "--rate", "1", "--scale", "1", "--jobs", "2").code == 0


def test_a_run_leaves_a_report_that_agrees_with_the_daemon(koala: Koala, server: Server, tmp_path: Path) -> None:
    file = written(tmp_path / "w.jsonl", ["echo", "a"], ["echo", "b"])
    done = koala("workload", "run", file, "--plots", "none")
    assert done.code == 0, done.err
    folder = tmp_path / "w.jsonl.report"
    report = json.loads((folder / "report.json").read_text())
    assert [job["id"] for job in report["jobs"]] == sorted(server.service.records)
    assert report["summary"]["states"] == {"succeeded": 2}
    assert {job.spec.owner for job in server.service.records.values()} == {"ada"}
    assert done.out == (folder / "report.md").read_text()
    again = koala("workload", "run", file, "--plots", "none")
    assert (again.code, "already has a report" in again.err) == (2, True)
    as_json = koala("workload", "run", file, "--plots", "none", "--overwrite", "--json")
    assert json.loads(as_json.out)["summary"]["ran"] == 2


def test_a_job_that_fails_is_told_by_the_exit_code(koala: Koala, tmp_path: Path) -> None:
    done = koala("workload", "run", written(tmp_path / "w", ["exit", "3"], ["echo", "a"]), "--plots", "none")
    assert done.code == 1
    assert "1 failed, 1 succeeded" in done.out


def test_a_workload_may_say_whose_its_jobs_are(koala: Koala, server: Server, tmp_path: Path) -> None:
    file = written(tmp_path / "w", ["echo", "a"])
    text = Path(file).read_text().replace('"command"', '"owner": "grace", "command"')
    Path(file).write_text(text)
    assert koala("workload", "run", file, "--plots", "none").code == 0
    assert {job.spec.owner for job in server.service.records.values()} == {"grace"}


def test_a_run_may_take_another_policy(koala: Koala, server: Server, tmp_path: Path) -> None:
    file = written(tmp_path / "w", ["echo", "a"])
    assert koala("workload", "run", file, "--policy", "cluster-minimization", "--plots", "none").code == 0
    (job,) = server.service.records.values()
    assert (job.spec.policy, job.spec.request.type, job.spec.request.total_size) == (
        "cluster-minimization",
        "flexible",
        2,
    )


def test_a_daemon_that_cannot_load_clusters_is_told_before_anything_is_submitted(
    koala: Koala, server: Server, tmp_path: Path
) -> None:
    done = koala("workload", "run", written(tmp_path / "w", ["echo", "a"]), "--background", "0.2")
    assert done.code in (3, 4)
    assert server.service.records == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "/nowhere"), "cannot read /nowhere"),
        (("run", "/dev/null"), "/dev/null is empty"),
        (("run", "/dev/null", "--plots", "gif"), "Invalid value for '--plots': 'gif'; known: none, png, svg"),
        (("run", "/dev/null", "--background", "2"), "--background"),
        (("report", "/nowhere"), "cannot read /nowhere/report.json"),
        (("report", "/nowhere", "--plots", "pdf"), "Invalid value for '--plots': 'pdf'"),
    ],
)
def test_wrong_usage_is_one_line(koala: Koala, arguments: tuple[str, ...], said: str) -> None:
    done = koala("workload", *arguments)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_runs_are_shown_again_and_compared(koala: Koala, tmp_path: Path) -> None:
    folders = []
    for policy in ("worst-fit", "cluster-minimization"):
        folders.append(str(tmp_path / policy))
        file = written(tmp_path / f"{policy}.jsonl", ["echo", "a"], policy="worst-fit")
        options = ("--policy", policy, "--directory", folders[-1], "--plots", "none")
        assert koala("workload", "run", file, *options).code == 0
    one = koala("workload", "report", folders[0], "--plots", "none")
    assert one.out.startswith("# Workload run: worst-fit")
    assert sorted(path.name for path in (tmp_path / "worst-fit").iterdir()) == ["report.json", "report.md"]
    drawn = koala("workload", "report", folders[0], "-o", str(tmp_path / "drawn"), "--plots", "svg")
    assert "![response](response.svg)" in drawn.out
    assert drawn.out == (tmp_path / "drawn" / "report.md").read_text()
    compared = koala("workload", "report", *folders, "-o", str(tmp_path / "both"), "--plots", "svg")
    assert compared.code == 0, compared.err
    assert "| cluster-minimization |" in compared.out
    told = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [run["label"] for run in told["runs"]] == ["worst-fit", "cluster-minimization"]
    assert json.loads(koala("workload", "report", *folders, "--json").out) == told


def test_what_is_no_report_is_said_to_be_none(koala: Koala, tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "report.json").write_text(text)
        assert koala("workload", "report", str(tmp_path)).code == 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["worst-fit", "cluster-minimization", "x"]))
def test_another_kind_of_request_asks_for_as_many_nodes(sizes: list[int], policy: str) -> None:
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


def test_the_line_of_progress() -> None:
    progress = Progress(seconds=63.2, jobs=30, submitted=12, total=8, ours=5, background=2, mean_background=0.19)
    progress.states.update(["running", "running", "queued"])
    progress.ended.update(["succeeded", "failed", "succeeded"])
    assert line_of(progress) == (
        "   63 s · 12/30 submitted · 1 wait, 2 run, 1 failed, 2 succeeded · nodes: 5 jobs, 2 background, 1 idle of 8"
        " · background 19% so far"
    )
