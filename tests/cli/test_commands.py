"""Output and exit codes of commands, against a server in this process."""

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from koalapy.cli.terminal import tables
from koalapy.cli.terminal.text import fold_text
from koalapy.client.client import Client
from koalapy.client.errors import Exit
from koalapy.client.timeouts import ClientTimeouts
from koalapy.model.alert import Alert, AlertKind, AlertRules, Severity
from koalapy.model.array import TaskIndices
from koalapy.model.job import ArrayTasks, JobState
from tests.cli.conftest import TOKEN, Koala, Server

FLEXIBLE = ("submit", "--flexible", "6")


def test_submit_prints_job_id_and_request(koala: Koala) -> None:
    result = koala(*FLEXIBLE, "--", "program", "--flag")
    assert (result.code, result.out, result.err) == (0, "Submitted job 1: flexible, 6 nodes, low priority\n", "")
    assert koala(*FLEXIBLE, "-q", "--", "program").out == "2\n"
    job = json.loads(koala(*FLEXIBLE, "--json", "--priority", "high", "--", "program", "--flag").out)
    assert (job["id"], job["owner"], job["priority"], job["command"]) == (3, "ada", "high", ["program", "--flag"])
    assert (job["workdir"], job["workdir_optional"]) == (str(Path.cwd()), True), "no folder was requested"
    with_folder = json.loads(koala(*FLEXIBLE, "--json", "--chdir", str(Path.cwd()), "--", "program").out)
    assert (with_folder["workdir"], with_folder["workdir_optional"]) == (str(Path.cwd()), False)
    assert [entry["event"] for entry in job["timeline"]] == ["submitted"]


def test_submit_sends_every_option(koala: Koala, server: Server) -> None:
    options = (
        "submit --flexible 6 --min-component 2 --max-components 2 --split 4,2 --split 3,3 --policy p "
        "--ppn 1 --name n --env A=1 --env B=2 --launcher processes --walltime 90m --output o --chdir /d "
        "--max-restarts 5 --policy-option metric=bandwidth --policy-option a=b=c --coallocation 2 "
        "--speed-ratio-min 0.5 --claiming incremental --claim-threshold 0 --max-placement-tries 6 "
        "--max-claiming-tries 7 --retry-on-exit 75 --retry-on-exit 1 --json program "
    )
    result = koala(*options.split())
    job = json.loads(result.out)
    assert job["request"] == {
        "type": "flexible",
        "total_size": 6,
        "min_component_size": 2,
        "max_components": 2,
        "split_options": [[4, 2], [3, 3]],
    }
    names = ("policy", "processes_per_node", "name", "environment", "launcher", "walltime", "output", "workdir")
    assert [job[name] for name in names] == ["p", 1, "n", {"A": "1", "B": "2"}, "processes", 5400, "o", "/d"]
    assert [job[f"max_{limit}"] for limit in ("restarts", "placement_tries", "claiming_tries")] == [5, 6, 7]
    assert job["policy_options"] == {"a": "b=c", "metric": "bandwidth"}
    names = ("coallocation", "speed_ratio_min", "claiming", "claim_threshold", "retry_on_exit")
    assert [job[name] for name in names] == [2, 0.5, "incremental", 0.0, [75, 1]]
    alone = koala("submit", "--flexible", "4", "--coallocation", "never", "--json", "program").out
    assert json.loads(alone)["coallocation"] == "never"


def test_submit_sends_every_field_of_job_file(koala: Koala, tmp_path: Path) -> None:
    fields = {
        "policy_options": {"metric": "latency", "group": "a"},
        "coallocation": 2,
        "speed_ratio_min": 0.5,
        "claiming": "atomic",
        "claim_threshold": 1.0,
        "max_claiming_tries": 3,
        "retry_on_exit": [75],
    }
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"request": {"type": "flexible", "total_size": 6}, "command": ["x"], **fields}))
    job = json.loads(koala("submit", "-f", str(file), "--json").out)
    assert {name: job[name] for name in fields} == fields
    changed = json.loads(
        koala("submit", "-f", str(file), "--policy-option", "metric=bandwidth", "--retry-on-exit", "9", "--json").out
    )
    assert changed["policy_options"] == {"metric": "bandwidth", "group": "a"}
    assert changed["retry_on_exit"] == [9]


def test_submit_reads_job_file_from_standard_input(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    job_file = b"request: {type: flexible, total_size: 6}\ncommand: [x]\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(job_file)))
    assert json.loads(koala("submit", "-f", "-", "--name", "piped", "--json").out)["name"] == "piped"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert koala("submit", "-f", "-").err.startswith("koala: standard input contains no job")


def test_submit_to_full_queue_prints_retry_time(koala: Koala) -> None:
    result = koala(*FLEXIBLE, "--name", "too many", "program")
    assert (result.code, result.out) == (4, "")
    assert result.err == "koala: 2 jobs wait already; submit again later (in 30 s)\n"


def test_submit_twice_with_same_key_creates_one_job(koala: Koala) -> None:
    again = [koala(*FLEXIBLE, "-q", "--idempotency-key", "k", "--", "program").out for _ in range(2)]
    assert again == ["1\n", "1\n"]


@pytest.mark.parametrize(
    ("command", "code", "out"), [(("echo", "hello"), 0, "hello\n"), (("exit", "3"), 3, "so far\n"), (("lost",), 1, "")]
)
def test_wait_exits_with_code_of_job(koala: Koala, command: tuple[str, ...], code: int, out: str) -> None:
    result = koala(*FLEXIBLE, "--wait", "--", *command)
    assert (result.code, result.out) == (code, out)
    assert ("koala: job 1 failed: the program failed\n" in result.err) == (code != 0)
    assert koala("wait", "1").code == code
    assert json.loads(koala("wait", "1", "--json").out)["id"] == 1


def test_output_of_too_many_components_is_not_continued(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_parts(*_: Any) -> Iterator[bytes]:
        for component in range(5_000):
            part = {"attempt": 1, "component": component, "offset": 100_000, "missing": 0, "data": "eA=="}
            yield json.dumps(part).encode() + b"\n"

    koala(*FLEXIBLE, "-q", "--", "echo", "hello")
    monkeypatch.setattr(Client, "_stream_pieces", send_parts)
    result = koala("logs", "1")
    assert (result.code, result.out) == (Exit.UNREACHABLE, "x" * 5_000)
    assert "output of 5000 components at once cannot be continued; koala logs 1 prints it from" in result.err


@pytest.mark.parametrize(
    "arguments", [("logs", "1"), ("logs", "-f", "1"), (*FLEXIBLE, "--wait", "--", "echo", "hello")]
)
def test_command_exits_with_1_if_output_is_missing(koala: Koala, server: Server, arguments: tuple[str, ...]) -> None:
    koala(*FLEXIBLE, "-q", "--", "echo", "hello")
    server.service.incomplete_output |= {1, 2}
    result = koala(*arguments)
    assert (result.code, result.out) == (1, "hello\n")
    assert "koala: a part of the output of job" in result.err


def test_submit_wait_json_prints_json_only(koala: Koala) -> None:
    result = koala(*FLEXIBLE, "--wait", "--json", "--", "exit", "3")
    assert (result.code, json.loads(result.out)["exit_code"], result.err) == (3, 3, "")


def test_wait_for_jobs_exits_with_first_failure(koala: Koala) -> None:
    for command in (("echo", "x"), ("exit", "4"), ("exit", "5")):
        koala(*FLEXIBLE, "--", *command)
    result = koala("wait", "1", "2", "3")
    assert (result.code, len(result.out.splitlines())) == (4, 3)


def test_wait_timeout_prints_output_and_exits_with_6(koala: Koala) -> None:
    result = koala(*FLEXIBLE, "--wait", "--timeout", "2", "--", "start", "early")
    assert (result.code, result.out) == (6, "early")
    assert "koala: job 1 is still running; the job continues: koala wait 1" in result.err
    assert koala("wait", "1", "--timeout", "0.1").code == 6


@contextmanager
def restarted_after(server: Server, event: threading.Event) -> Iterator[None]:
    """Restart the server after an event in the block; job 1 prints more and succeeds in between."""

    def restart() -> None:
        assert event.wait(30)
        server.end()
        server.service.records[1] = replace(server.service.records[1], state=JobState.SUCCEEDED, exit_code=0)
        server.service.output[1] += b" and late"
        server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    yield
    restarting.join()


def test_wait_continues_after_daemon_restart(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "-q", "--", "start", "early")

    with restarted_after(server, server.service.wait_started):
        result = koala("wait", "1")
    assert (result.code, result.out) == (0, "job 1 succeeded\n")


AWAY = "koala: the database does not answer; still waiting\n"


@pytest.mark.parametrize("arguments", [("wait", "1"), ("wait", "1", "--timeout", "60"), ("logs", "-f", "1")])
def test_unreachable_database_is_reported_once_while_waiting(
    koala: Koala, server: Server, arguments: tuple[str, ...]
) -> None:
    koala(*FLEXIBLE, "-q", "--", "echo", "hello")
    server.service.failing_reads = 3
    result = koala(*arguments)
    assert (result.code, result.err) == (0, AWAY)
    assert result.out == ("hello\n" if arguments[0] == "logs" else "job 1 succeeded\n")


def test_submit_wait_continues_while_database_is_unreachable(koala: Koala, server: Server) -> None:
    server.service.failing_reads = 3
    result = koala(*FLEXIBLE, "--wait", "--", "exit", "3")
    assert result.code == 3
    assert AWAY in result.err


def test_wait_timeout_applies_while_database_is_unreachable(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "-q", "--", "echo", "hello")
    server.service.failing_reads = 10**6
    result = koala("wait", "1", "--timeout", "0.5")
    assert (result.code, "job 1 is still unknown" in result.err) == (6, True)


@pytest.mark.parametrize("arguments", [("logs", "-f", "1"), (*FLEXIBLE, "--wait", "--", "start", "early")])
def test_followed_output_continues_after_daemon_restart(
    koala: Koala, server: Server, arguments: tuple[str, ...]
) -> None:
    koala(*FLEXIBLE, "-q", "--idempotency-key", "k", "--", "start", "early")
    if "--wait" in arguments:
        arguments = (*FLEXIBLE, "--wait", "--idempotency-key", "k", "--", "start", "early")
    with restarted_after(server, server.service.output_followed):
        result = koala(*arguments)
    assert (result.code, result.out) == (0, "early and late")
    assert result.err.count("still waiting") == 1


def test_followed_output_continues_after_daemon_was_away_for_long(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "-q", "--", "start", "early")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 200:
            server.service.records[1] = replace(server.service.records[1], state=JobState.SUCCEEDED, exit_code=0)
            server.start()

    following = Client(server.url, TOKEN, timeouts=ClientTimeouts(sleep=pause)).follow_output(1)
    assert next(following) == (b"early", True)
    server.end()
    assert list(following) == [(b"", True)]


@pytest.fixture
def ended_array(koala: Koala, server: Server) -> int:
    """Return an array of three tasks, of which two have failed."""
    records, end = server.service.records, {"state": JobState.FAILED, "ended_at": 1009.0}
    for command in (("program",), ("echo", "one"), ("exit", "3"), ("exit", "3")):
        koala(*FLEXIBLE, "-q", "--", *command)
    tasks = ArrayTasks(3, (), 1000.0, succeeded=1, failed=2)
    spec = replace(records[1].spec, array=TaskIndices.parse("4-6"))
    records[1] = replace(records[1], spec=spec, tasks=tasks, reason="2 of 3 tasks failed", **end)
    for number, index in ((2, 4), (3, 5), (4, 6)):
        records[number] = replace(records[number], array_job=1, array_index=index)
    return 1


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_logs_of_array_label_the_output_of_its_tasks(koala: Koala, ended_array: int, follow: tuple[str, ...]) -> None:
    result = koala("logs", str(ended_array), *follow)
    assert (result.code, result.out) == (0, "4: one\n5: so far\n6: so far\n")


def test_submit_wait_of_array_ends_with_reasons_of_failures(
    koala: Koala, server: Server, ended_array: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server.service.keys, "k", ended_array)
    result = koala(*FLEXIBLE, "--wait", "--array", "4-6", "--idempotency-key", "k", "--", "program")
    assert result.code == 1
    assert result.err.endswith("koala: job 1 failed: 2 of 3 tasks failed\nkoala: 1[5], 1[6]: the program failed\n")


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_logs_of_missing_component_is_rejected(koala: Koala, follow: tuple[str, ...]) -> None:
    koala(*FLEXIBLE, "start", "hello")
    assert koala("logs", "1", "--component", "0").out == "hello"
    if not follow:
        ended = koala("logs", "1", "--component", "9")
        assert (ended.code, ended.err) == (3, "koala: job 1 has no component 9; give one of 0\n")
    koala("cancel", "1")
    assert koala("logs", "1", "--component", "9", *follow).code == 3


def test_submit_with_relative_chdir_in_deleted_directory_is_rejected(
    koala: Koala, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    ended = koala(*FLEXIBLE, "--chdir", "sub", "x")
    assert (ended.code, ended.err) == (2, "koala: the current folder was deleted; change to another with cd\n")


def test_submit_with_relative_chdir_runs_below_current_directory(koala: Koala) -> None:
    def workdir(folder: str) -> str:
        return str(json.loads(koala(*FLEXIBLE, "--json", "--chdir", folder, "x").out)["workdir"])

    assert workdir("sub/folder") == str(Path.cwd() / "sub/folder")
    assert workdir(".") == str(Path.cwd())


def test_logs_prints_output_of_job(koala: Koala) -> None:
    koala(*FLEXIBLE, "--", "echo", "hello")
    assert koala("logs", "1").out == koala("logs", "-f", "1").out == "hello\n"
    refused = koala("logs", "1", "--error")
    assert refused.code == Exit.USAGE
    assert "writes output and errors into one stream; leave it out" in refused.err
    koala(*FLEXIBLE, "-e", "errors", "--", "echo", "hello")
    assert koala("logs", "2", "--output", "--tail", "5").code == 0


def test_queue_lists_and_filters_jobs(koala: Koala) -> None:
    assert (koala("queue", "-q").out, koala("queue", "-o", "ndjson").out) == ("", "")
    for arguments in (("--name", "a", "program"), ("--name", "b", "start"), ("--name", "c", "echo", "x")):
        koala(*FLEXIBLE, *arguments)
    lines = koala("queue").out.splitlines()
    assert " ".join(lines[0].split()) == "ID NAME USER PRI STATE NODES TIME CLUSTERS REASON"
    assert [line.split()[:2] for line in lines[1:]] == [["2", "b"], ["1", "a"]]
    assert "too few idle nodes" in lines[2]
    assert "north:2" in lines[1]
    assert koala("queue", "-q", "--state", "succeeded").out == "3\n"
    assert koala("queue", "-q", "--user", "bob").out == ""
    assert [j["id"] for j in json.loads(koala("queue", "--json").out)["jobs"]] == [2, 1]
    assert [json.loads(line)["id"] for line in koala("queue", "-o", "ndjson").out.splitlines()] == [2, 1]
    assert "SUBMITTED" in koala("queue", "-o", "wide").out
    koala(*FLEXIBLE, "--home-site", "north", "start")
    assert koala("queue", "-q", "--home-site", "north").out == "4\n"
    assert "HOME" in koala("queue", "-o", "wide").out
    assert "home site  north" in koala("show", "4").out
    assert "home site" not in koala("show", "1").out
    koala(*FLEXIBLE, "program")
    few = koala("queue", "-q", "--limit", "3")
    assert (few.out, few.err) == ("4\n2\n1\n", "koala: 3 of 4 jobs; --limit 100 for more\n")
    of_state = koala("queue", "-q", "--limit", "1", "--state", "running")
    assert (of_state.out, of_state.err) == ("4\n", "koala: 1 of 2 jobs; --limit 100 for more\n")
    every_state = koala("queue", "-q", "--limit", "1", "--state", "running", "--state", "succeeded")
    assert (every_state.out, every_state.err) == ("4\n", "koala: 1 of 3 jobs; --limit 100 for more\n")


def test_queue_with_more_waiting_jobs_than_the_limit_shows_all_running_jobs(
    koala: Koala, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koalapy.client.client.MAX_PAGE_SIZE", 2)
    for _ in range(5):
        koala(*FLEXIBLE, "start")
    for _ in range(4):
        koala(*FLEXIBLE, "program")
    listed = koala("queue", "-q", "--all", "--limit", "8")
    assert listed.out.split() == ["5", "4", "3", "2", "1", "6", "7", "8"]
    assert listed.err == "koala: 8 of 9 jobs; --limit 100 for more\n"
    unlimited = koala("queue", "-q")
    assert (unlimited.out.split(), unlimited.err) == (["5", "4", "3", "2", "1", "6", "7", "8", "9"], "")


def test_queue_without_matching_jobs_names_filters(koala: Koala) -> None:
    assert koala("queue").err == "koala: you have no unfinished jobs\n"
    result = koala("queue", "--user", "nobody", "--state", "FAILED", "--name", "x")
    assert result.err == "koala: nobody has no failed jobs named x\n"
    assert (result.code, len(result.out.splitlines())) == (0, 1)
    nowhere = koala("queue", "--cluster", "nroth", "--all", "-q")
    assert (nowhere.code, nowhere.out) == (3, "")
    assert nowhere.err.startswith("koala: there is no cluster nroth; did you mean north?")
    assert koala("queue", "--cluster", "north", "--all").err.endswith(
        "there are no unfinished jobs with a component on north\n"
    )
    of_site = koala("queue", "--home-site", "north").err
    assert of_site == "koala: you have no unfinished jobs whose home site is north\n"
    assert koala("queue", "--home-site", "nroth", "--all").code == 3
    assert koala("queue", "--json").err == ""


def test_table_folds_long_reason_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    header, reason = ["ID", "NAME", "REASON"], "local users of north were faster than this job three times in a row"
    monkeypatch.setattr(tables, "terminal_size", lambda _: (50, 24))
    assert tables.format_table(header, [["1", "short", reason], ["2", "x", "-"]]).splitlines() == [
        "ID  NAME   REASON",
        "1   short  local users of north were faster than",
        "           this job three times in a row",
        "2   x      -",
    ]
    below = tables.format_table(header, [["1", "n" * 40, reason]]).splitlines()
    assert below == [
        "ID  NAME",
        "    REASON",
        f"1   {'n' * 40}",
        "    local users of north were faster than this job",
        "    three times in a row",
    ]
    monkeypatch.setattr(tables, "terminal_size", lambda _: None)
    assert tables.format_table(header, [["1", "n" * 40, reason]]).splitlines()[1].endswith("in a row")


@given(st.text(st.sampled_from("ab 東\u0301"), max_size=40), st.integers(2, 9))
def test_fold_text_fits_and_keeps_text(text: str, columns: int) -> None:
    lines = fold_text(text, columns)
    assert all(cell_len(line) <= columns for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_show_prints_page_of_job(koala: Koala) -> None:
    koala(*FLEXIBLE, "--name", "mine", "--", "start", "x")
    page = koala("show", "1").out
    for text in ("1 (mine)", "flexible, 6 nodes", "127.0.1.1,127.0.1.2", "+0.250s", "submitted", "north:2"):
        assert text in page
    assert json.loads(koala("show", "1", "--json").out)["components"][0]["size"] == 2


def test_states_of_several_jobs_are_words_and_a_table(koala: Koala) -> None:
    for command in (("echo", "x"), ("program",), ("exit", "3")):
        koala(*FLEXIBLE, "--name", "a", "--", *command)
    assert koala("show", "-q", "3", "1", "2", "1").out == "failed\nsucceeded\nqueued\nsucceeded\n"
    assert koala("show", "-q").out == "failed\n"
    assert [line.split()[4] for line in koala("queue", "1", "3").out.splitlines()] == ["STATE", "failed", "succeeded"]
    assert koala("queue", "1", "2", "-q").out == "2\n1\n"
    assert koala("queue", "1", "9").err.startswith("koala: there is no started job 9; ")
    missing = koala("show", "-q", "1", "9", "2")
    assert (missing.code, missing.out) == (3, "succeeded\n-\nqueued\n")
    assert missing.err == "koala: there is no job 9; see koala history\n"
    assert koala("show", "1", "2").out.count("TIME") == 2
    assert [job["id"] for job in json.loads(koala("show", "2", "1", "--json").out)] == [2, 1]


def test_priority_changes_queued_jobs(koala: Koala) -> None:
    for _ in range(2):
        koala("submit", "--flexible", "6", "program")
    result = koala("priority", "high", "1", "2", "--reason", "a deadline")
    assert result.out == "job 1 queued, high priority\njob 2 queued, high priority\n"
    assert json.loads(koala("show", "1", "--json").out)["priority"] == "high"


def test_cancel_continues_after_errors_and_exits_with_worst(koala: Koala, server: Server) -> None:
    for _ in range(2):
        koala(*FLEXIBLE, "program")
    koala(*FLEXIBLE, "echo", "done")
    assert koala("hold", "1", "--reason", "later").out == "job 1 held\n"
    assert koala("release", "1").out == "job 1 queued\n"
    result = koala("cancel", "1", "3", "1", "9", "2")
    assert (result.code, result.out) == (4, "job 1 cancelled\njob 2 cancelled\n")
    assert [line.split(";")[0] for line in result.err.splitlines()] == [
        "koala: job 3 is over already",
        "koala: there is no job 9",
    ]
    assert not server.service.warned
    again = koala("cancel", "--warn", "1", "2")
    assert server.service.warned == {1, 2}
    assert (again.code, again.out, again.err) == (0, result.out, "")
    result = koala("hold", "1", "9")
    assert (result.code, result.err.splitlines()[0].split(";")[0]) == (3, "koala: there is no job 9")


def test_clusters_lists_and_clears_errors(koala: Koala, server: Server) -> None:
    lines = koala("clusters").out.splitlines()
    assert " ".join(lines[0].split()) == "NAME KIND STATE TOTAL IDLE USED BACKGROUND DOWN ERRORS REASON"
    assert lines[2].endswith("3 errors in a row")
    assert koala("clusters", "clear", "south", "--url", server.url).out == "cluster south is usable\n"
    assert koala("clusters", "clear", "a/b").code == 3


def test_clusters_lost_without_confirmation_changes_nothing(koala: Koala) -> None:
    refused = koala("clusters", "lost", "south")
    assert refused.code == 2
    assert "A program that still runs there then runs twice." in refused.err
    problem = "declaring cluster south lost needs a confirmation, and there is no terminal to ask on"
    assert refused.err.endswith(f"koala: {problem}; add --yes if nothing runs on south any more\n")
    assert koala("clusters", "lost", "south", "--yes").out == "cluster south is lost: its jobs are tried again\n"


def test_clusters_drain_and_resume_change_state(koala: Koala, server: Server) -> None:
    result = koala("clusters", "drain", "south", "--reason", "new switches")
    assert result.out == "cluster south is drained; jobs still have 2 nodes there\n"
    line = koala("clusters").out.splitlines()[2]
    assert line.split()[:3] == ["south", "local", "drained"]
    assert line.endswith("since 1970-01-01 00:16 UTC by ada: new switches; also unusable after 3 errors")
    assert koala("clusters", "resume", "south").out == "cluster south is unusable\n"
    again = koala("clusters", "resume", "south")
    assert (again.code, again.out, again.err) == (
        4,
        "",
        "koala: cluster south is not drained; nothing to resume; koala clusters shows the drained ones\n",
    )
    assert koala("clusters", "drain", "south", "--requeue", "--reason", "x").out == "cluster south is drained\n"
    assert koala("clusters", "drain", "south", "--reason", "two\nlines").code == 2


def test_clusters_drain_with_times_plans_it(koala: Koala, server: Server) -> None:
    times = "--from", "2026-12-01T08:00Z", "--until", "2026-12-01T12:00Z"
    result = koala("clusters", "drain", "south", "--reason", "new switches", *times)
    assert result.out == "cluster south will be drained from 2026-12-01 08:00:00 to 2026-12-01 12:00:00 UTC\n"
    for begin, count in (("09:00Z", 1), ("08:00Z", 0)):
        resumed = koala("clusters", "resume", "south", "--from", f"2026-12-01T{begin}", "--json")
        assert len(json.loads(resumed.out)["planned_drains"]) == count
    assert koala("clusters", "resume", "south", "--planned").code == 0


def test_error_in_job_file_names_its_field(koala: Koala, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("request: {type: flexible, total_size: 20}\ncommand: [x]\n")
    assert koala("submit", "-f", str(file)).err.startswith("koala: request.total_size is 20")
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [x]\nnmae: x\n")
    result = koala("submit", "-f", str(file))
    assert result.err.startswith("koala: unknown field nmae; did you mean name?")
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [x]\nname: 2026-01-01\n")
    assert koala("submit", "-f", str(file)).code == 2
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [x]\nenvironment: [A]\n")
    assert koala("submit", "-f", str(file), "--env", "B=1").code == 2


def test_wrong_token_is_rejected_with_hint(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(tokens=("another-long-secret",)) as server:
        refused = koala("queue", "--url", server.url)
        assert (refused.code, refused.err.count("\n")) == (4, 1)
        assert "correct KOALA_TOKEN or --token" in refused.err
        monkeypatch.setenv("KOALA_TOKEN", "another-long-secret")
        assert koala("queue", "--url", server.url).code == 0


def test_show_replaces_control_codes(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "--", "program", "\x1b[2J\nsecond line")
    page = koala("show", "1").out
    assert "\x1b" not in page
    assert "?[2J second line" in page


def test_alerts_ack_silence_and_expire_show_the_mark(
    koala: Koala, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_alerts(now: float) -> AsyncIterator[Alert]:
        for name in ("north", "south"):
            texts = {"summary": f"the agent of {name} is absent", "cause": "unknown", "remedy": "restart it"}
            yield Alert(AlertKind.AGENT_AWAY, Severity.CRITICAL, f"cluster {name}", **texts, since=now, cluster=name)

    monkeypatch.setattr(server.alerts, "_checks", [find_alerts])
    monkeypatch.setattr(server.alerts, "_rules", AlertRules(hold=0))
    asyncio.run(server.alerts.run_checks())
    acknowledged = koala("alerts", "ack", "agent-away", "cluster north", "-d", "2h", "--comment", "new switch")
    assert (acknowledged.code, acknowledged.err) == (0, "")
    assert "acknowledged by ada until 20" in acknowledged.out
    assert acknowledged.out.endswith(": new switch\n")
    listed = koala("alerts").out
    assert acknowledged.out.strip().splitlines()[-1] in listed
    assert "cluster south" in listed
    assert koala("alerts", "silence", "agent-away").out.count("silenced by ada") == 2
    assert "by ada" not in koala("alerts", "expire", "agent-away").out
    assert "by ada" not in koala("alerts").out
    for wrong in (("ack", "disk"), ("silence", "agent-away", "-d", "40-00:00:00"), ("ack", "agent-away", "cluster x")):
        refused = koala("alerts", *wrong)
        assert (refused.code != 0, refused.out) == (True, ""), refused
        assert refused.err.startswith("koala: ")
