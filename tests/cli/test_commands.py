"""What each command prints and exits with, against a real server."""

import io
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from koalapy.cli.terminal import tables
from koalapy.cli.terminal.width import fold_text
from koalapy.model.job import JobState
from tests.cli.conftest import Koala, Server

FLEXIBLE = ("submit", "--flexible", "6")


def test_submit_says_what_was_submitted(koala: Koala) -> None:
    done = koala(*FLEXIBLE, "--", "program", "--flag")
    assert (done.code, done.out, done.err) == (0, "Submitted job 1: flexible, 6 nodes, low priority\n", "")
    assert koala(*FLEXIBLE, "-q", "--", "program").out == "2\n"
    job = json.loads(koala(*FLEXIBLE, "--json", "--priority", "high", "--", "program", "--flag").out)
    assert (job["id"], job["owner"], job["priority"], job["command"]) == (3, "ada", "high", ["program", "--flag"])
    assert (job["workdir"], job["workdir_optional"]) == (str(Path.cwd()), True), "nobody asked for it"
    asked = json.loads(koala(*FLEXIBLE, "--json", "--chdir", str(Path.cwd()), "--", "program").out)
    assert (asked["workdir"], asked["workdir_optional"]) == (str(Path.cwd()), False)
    assert [entry["event"] for entry in job["timeline"]] == ["submitted"]


def test_every_option_arrives(koala: Koala, server: Server) -> None:
    options = (
        "submit --flexible 6 --min-component 2 --max-components 2 --split 4,2 --split 3,3 --policy p "
        "--ppn 1 --name n --env A=1 --env B=2 --launcher processes --walltime 90m --output o --chdir /d "
        "--max-restarts 5 --policy-option metric=bandwidth --policy-option a=b=c --coallocation 2 "
        "--speed-ratio-min 0.5 --claiming incremental --claim-threshold 0 --max-placement-tries 6 "
        "--max-claiming-tries 7 --retry-on-exit 75 --retry-on-exit 1 --json program "
    )
    done = koala(*options.split())
    job = json.loads(done.out)
    assert job["request"] == {
        "type": "flexible",
        "total_size": 6,
        "min_component_size": 2,
        "max_components": 2,
        "split_options": [[4, 2], [3, 3]],
    }
    shown = ("policy", "processes_per_node", "name", "environment", "launcher", "walltime", "output", "workdir")
    assert [job[name] for name in shown] == ["p", 1, "n", {"A": "1", "B": "2"}, "processes", 5400, "o", "/d"]
    assert [job[f"max_{what}"] for what in ("restarts", "placement_tries", "claiming_tries")] == [5, 6, 7]
    assert job["policy_options"] == {"a": "b=c", "metric": "bandwidth"}
    shown = ("coallocation", "speed_ratio_min", "claiming", "claim_threshold", "retry_on_exit")
    assert [job[name] for name in shown] == [2, 0.5, "incremental", 0.0, [75, 1]]
    alone = koala("submit", "--flexible", "4", "--coallocation", "never", "--json", "program").out
    assert json.loads(alone)["coallocation"] == "never"


def test_every_field_of_a_file_arrives(koala: Koala, tmp_path: Path) -> None:
    told = {
        "policy_options": {"metric": "latency", "group": "a"},
        "coallocation": 2,
        "speed_ratio_min": 0.5,
        "claiming": "atomic",
        "claim_threshold": 1.0,
        "max_claiming_tries": 3,
        "retry_on_exit": [75],
    }
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"request": {"type": "flexible", "total_size": 6}, "command": ["x"], **told}))
    job = json.loads(koala("submit", "-f", str(file), "--json").out)
    assert {name: job[name] for name in told} == told
    changed = json.loads(
        koala("submit", "-f", str(file), "--policy-option", "metric=bandwidth", "--retry-on-exit", "9", "--json").out
    )
    assert changed["policy_options"] == {"metric": "bandwidth", "group": "a"}
    assert changed["retry_on_exit"] == [9]


def test_a_job_comes_from_standard_input(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    told = b"request: {type: flexible, total_size: 6}\ncommand: [x]\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(told)))
    assert json.loads(koala("submit", "-f", "-", "--name", "piped", "--json").out)["name"] == "piped"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert koala("submit", "-f", "-").err.startswith("koala: standard input contains no job")


def test_a_full_queue_tells_when_to_come_back(koala: Koala) -> None:
    done = koala(*FLEXIBLE, "--name", "too many", "program")
    assert (done.code, done.out) == (4, "")
    assert done.err == "koala: 2 jobs wait already; submit again later (in 30 s)\n"


def test_the_same_key_makes_one_job(koala: Koala) -> None:
    again = [koala(*FLEXIBLE, "-q", "--idempotency-key", "k", "--", "program").out for _ in range(2)]
    assert again == ["1\n", "1\n"]


@pytest.mark.parametrize(
    ("command", "code", "out"), [(("echo", "hello"), 0, "hello\n"), (("exit", "3"), 3, "so far\n"), (("lost",), 1, "")]
)
def test_waiting_ends_with_the_jobs_code(koala: Koala, command: tuple[str, ...], code: int, out: str) -> None:
    done = koala(*FLEXIBLE, "--wait", "--", *command)
    assert (done.code, done.out) == (code, out)
    assert ("koala: job 1 failed: the program failed\n" in done.err) == (code != 0)
    assert koala("wait", "1").code == code
    assert json.loads(koala("wait", "1", "--json").out)["id"] == 1


def test_waiting_in_json_prints_nothing_but_json(koala: Koala) -> None:
    done = koala(*FLEXIBLE, "--wait", "--json", "--", "exit", "3")
    assert (done.code, json.loads(done.out)["exit_code"], done.err) == (3, 3, "")


def test_the_first_that_failed_gives_the_code_of_several(koala: Koala) -> None:
    for command in (("echo", "x"), ("exit", "4"), ("exit", "5")):
        koala(*FLEXIBLE, "--", *command)
    done = koala("wait", "1", "2", "3")
    assert (done.code, len(done.out.splitlines())) == (4, 3)


def test_a_timeout_is_told_and_the_output_before_it_shown(koala: Koala) -> None:
    done = koala(*FLEXIBLE, "--wait", "--timeout", "2", "--", "start", "early")
    assert (done.code, done.out) == (6, "early")
    assert "koala: job 1 is still running; the job continues: koala wait 1" in done.err
    assert koala("wait", "1", "--timeout", "0.1").code == 6


def test_waiting_survives_the_daemon(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "-q", "--", "start", "early")

    def restart() -> None:
        assert server.service.waited_for.wait(30)
        server.end()
        server.service.records[1] = replace(server.service.records[1], state=JobState.SUCCEEDED, exit_code=0)
        server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    done = koala("wait", "1")
    restarting.join()
    assert (done.code, done.out) == (0, "job 1 succeeded\n")


AWAY = "koala: the database does not answer; still waiting\n"


@pytest.mark.parametrize("arguments", [("wait", "1"), ("wait", "1", "--timeout", "60"), ("logs", "-f", "1")])
def test_a_database_that_is_away_is_waited_for_and_told_once(
    koala: Koala, server: Server, arguments: tuple[str, ...]
) -> None:
    koala(*FLEXIBLE, "-q", "--", "echo", "hello")
    server.service.unanswered = 3
    done = koala(*arguments)
    assert (done.code, done.err) == (0, AWAY)
    assert done.out == ("hello\n" if arguments[0] == "logs" else "job 1 succeeded\n")


def test_who_waits_for_a_submitted_job_bears_a_database_that_is_away(koala: Koala, server: Server) -> None:
    server.service.unanswered = 3
    done = koala(*FLEXIBLE, "--wait", "--", "exit", "3")
    assert done.code == 3
    assert AWAY in done.err


def test_a_timeout_holds_while_the_database_is_away(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "-q", "--", "echo", "hello")
    server.service.unanswered = 10**6
    done = koala("wait", "1", "--timeout", "0.5")
    assert (done.code, "job 1 is still unknown" in done.err) == (6, True)


def test_what_is_followed_is_waited_for_when_its_daemon_went_away(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "-q", "--", "start", "early")

    def restart() -> None:
        assert server.service.followed.wait(30)
        server.end()
        server.service.records[1] = replace(server.service.records[1], state=JobState.SUCCEEDED, exit_code=0)
        server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    done = koala("logs", "-f", "1")
    restarting.join()
    assert (done.code, done.out) == (0, "early")
    assert "still waiting" in done.err
    assert done.err.endswith("koala: the daemon was unreachable for a while; koala logs 1 shows all of the output\n")


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_logs_of_component_that_is_not_there_is_refused(koala: Koala, follow: tuple[str, ...]) -> None:
    koala(*FLEXIBLE, "start", "hello")
    assert koala("logs", "1", "--component", "0").out == "hello"
    if not follow:
        ended = koala("logs", "1", "--component", "9")
        assert (ended.code, ended.err) == (3, "koala: job 1 has no component 9; give one of 0\n")
    koala("cancel", "1")
    assert koala("logs", "1", "--component", "9", *follow).code == 3


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("submit", "--flexible", "1", "--timeout", "5", "x"), "--timeout needs --wait"),
        (("submit", "--flexible", "1", "-q", "--json", "x"), "--quiet and --json cannot be given together"),
        (("queue", "-q", "--json"), "--quiet and --json cannot be given together"),
        (("queue", "-q", "-o", "json"), "--quiet and --json cannot be given together"),
        (("queue", "-o", "wide", "--json"), "--output and --json cannot be given together"),
        (("queue", "--all", "--user", "bob"), "--user and --all cannot be given together"),
        (("show", "1", "-f", "--json"), "--follow and --json cannot be given together"),
        (("token", "create", "-q", "--json"), "--quiet and --json cannot be given together"),
    ],
)
def test_option_that_would_be_ignored_is_refused(koala: Koala, words: tuple[str, ...], refused: str) -> None:
    ended = koala(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"koala: {refused}")


def test_submit_with_relative_chdir_runs_below_current_directory(koala: Koala) -> None:
    def workdir(given: str) -> str:
        return str(json.loads(koala(*FLEXIBLE, "--json", "--chdir", given, "x").out)["workdir"])

    assert workdir("sub/folder") == str(Path.cwd() / "sub/folder")
    assert workdir(".") == str(Path.cwd())


def test_logs(koala: Koala) -> None:
    koala(*FLEXIBLE, "--", "echo", "hello")
    assert koala("logs", "1").out == koala("logs", "-f", "1").out == "hello\n"
    assert koala("logs", "7").code == 3


def test_the_queue(koala: Koala) -> None:
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
    few = koala("queue", "-q", "--limit", "1")
    assert (few.out, few.err) == ("4\n2\n1\n", "")
    koala(*FLEXIBLE, "program")
    few = koala("queue", "-q", "--limit", "1")
    assert (few.out, few.err) == ("4\n2\n5\n", "koala: only the newest 1 that wait are shown; --limit shows more\n")
    of_state = koala("queue", "-q", "--limit", "1", "--state", "running")
    assert (of_state.out, of_state.err) == ("4\n", "koala: only the newest 1 are shown; --limit shows more\n")


def test_queue_with_more_newer_waiting_jobs_than_the_limit_shows_all_running_jobs(
    koala: Koala, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koalapy.client.client.MAX_PAGE_SIZE", 2)
    for _ in range(5):
        koala(*FLEXIBLE, "start")
    for _ in range(4):
        koala(*FLEXIBLE, "program")
    listed = koala("queue", "-q", "--all", "--limit", "3")
    assert listed.out.split() == ["5", "4", "3", "2", "1", "9", "8", "7"]
    assert "only the newest 3 that wait are shown" in listed.err
    whole = koala("queue", "-q")
    assert (whole.out.split(), whole.err) == (["5", "4", "3", "2", "1", "9", "8", "7", "6"], "")


def test_a_queue_in_which_nothing_is_found_says_what_was_looked_for(koala: Koala) -> None:
    assert koala("queue").err == "koala: there are no jobs of yours that are not over\n"
    found = koala("queue", "--user", "nobody", "--state", "FAILED", "--name", "x")
    assert found.err == "koala: there are no jobs of nobody named x in the state failed\n"
    assert (found.code, len(found.out.splitlines())) == (0, 1)
    nowhere = koala("queue", "--cluster", "nroth", "--all", "-q")
    assert (nowhere.code, nowhere.out) == (3, "")
    assert nowhere.err.startswith("koala: there is no cluster nroth; did you mean north?")
    assert koala("queue", "--cluster", "north", "--all").err.endswith("with a component on north that are not over\n")
    of_site = koala("queue", "--home-site", "north").err
    assert of_site == "koala: there are no jobs of yours whose home site is north that are not over\n"
    assert koala("queue", "--home-site", "nroth", "--all").code == 3
    assert koala("queue", "--json").err == ""


def test_a_long_reason_is_folded_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_folding_loses_nothing_and_fits(text: str, columns: int) -> None:
    lines = fold_text(text, columns)
    assert all(cell_len(line) <= columns for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_show(koala: Koala) -> None:
    koala(*FLEXIBLE, "--name", "mine", "--", "start", "x")
    page = koala("show", "1").out
    for text in ("1 (mine)", "flexible, 6 nodes", "127.0.1.1,127.0.1.2", "+0.250s", "submitted"):
        assert text in page
    assert json.loads(koala("show", "1", "--json").out)["components"][0]["size"] == 2


def test_jobs_are_given_another_priority(koala: Koala) -> None:
    for _ in range(2):
        koala("submit", "--flexible", "6", "program")
    done = koala("priority", "high", "1", "2", "--reason", "a deadline")
    assert done.out == "job 1 queued, high priority\njob 2 queued, high priority\n"
    assert json.loads(koala("show", "1", "--json").out)["priority"] == "high"
    assert koala("priority", "higher", "1").code == 2


def test_acting_goes_on_after_errors_and_exits_with_the_worst(koala: Koala, server: Server) -> None:
    for _ in range(2):
        koala(*FLEXIBLE, "program")
    koala(*FLEXIBLE, "echo", "done")
    assert koala("hold", "1", "--reason", "later").out == "job 1 held\n"
    assert koala("release", "1").out == "job 1 queued\n"
    done = koala("cancel", "1", "3", "1", "9", "2")
    assert (done.code, done.out) == (4, "job 1 cancelled\njob 2 cancelled\n")
    assert [line.split(";")[0] for line in done.err.splitlines()] == [
        "koala: job 3 is over already",
        "koala: there is no job 9",
    ]
    assert not server.service.warned
    again = koala("cancel", "--warn", "1", "2")
    assert server.service.warned == {1, 2}
    assert (again.code, again.out, again.err) == (0, done.out, "")
    done = koala("hold", "1", "9")
    assert (done.code, done.err.splitlines()[0].split(";")[0]) == (3, "koala: there is no job 9")


def test_clusters(koala: Koala, server: Server) -> None:
    lines = koala("clusters").out.splitlines()
    assert " ".join(lines[0].split()) == "NAME KIND STATE TOTAL IDLE USED BACKGROUND DOWN ERRORS REASON"
    assert lines[2].endswith("3 errors in a row")
    assert koala("clusters", "clear", "south", "--url", server.url).out == "cluster south is usable\n"
    assert koala("clusters", "clear", "a/b").code == 3


def test_clusters_lost_without_confirmation_changes_nothing(koala: Koala) -> None:
    refused = koala("clusters", "lost", "south")
    assert refused.code == 2
    assert "A program that still runs there then runs twice." in refused.err
    assert refused.err.endswith("koala: this needs a confirmation; add --yes if nothing runs on south any more\n")
    assert koala("clusters", "lost", "south", "--yes").out == "cluster south is lost: its jobs are tried again\n"
    assert koala("clusters", "lost", "nroth", "--yes").code == 3


def test_a_cluster_is_drained_and_resumed(koala: Koala, server: Server) -> None:
    done = koala("clusters", "drain", "south", "--reason", "new switches")
    assert done.out == "cluster south is drained; jobs still have 2 nodes there\n"
    line = koala("clusters").out.splitlines()[2]
    assert line.split()[:3] == ["south", "local", "drained"]
    assert line.endswith("since 1970-01-01 00:16 UTC by ada: new switches; also unusable after 3 errors")
    assert koala("clusters", "drain", "south", "--url", server.url).code == 0
    assert "by ada: new switches; also" in koala("clusters").out
    assert koala("clusters", "resume", "south").out == "cluster south is unusable\n"
    again = koala("clusters", "resume", "south")
    assert (again.code, again.out, again.err) == (4, "", "koala: cluster south is not drained; see koala clusters\n")
    assert koala("clusters", "drain", "south", "--requeue").out == "cluster south is drained\n"
    assert koala("clusters", "drain", "south", "--reason", "two\nlines").code == 2
    assert koala("clusters", "drain", "nroth").err.startswith("koala: there is no cluster nroth; did you mean north?")


METRICS = """\
The last 1:00:00, until 1970-01-01T01:00:00.000Z; NODES to IDLE are those of now.

CLUSTER  NODES  USED  BACKGROUND  IDLE  NODE-HOURS  UTILISATION
north    4      0     0           4     2.00        50.0%
south    4      0     0           4     0.00        0.0%

PRIORITY  JOBS  QUEUE TIME  WAIT TIME  START-UP  RESPONSE TIME  START DELAY
high      0     -           -          -         -              -
low       3     1.500 s     62.000 s   60.500 s  3725.250 s     -

BACKGROUND: nodes of the clusters' own users. START-UP: from the placement to the program's start.
START DELAY: how much later than first estimated jobs were to start.

Jobs that ended: 2 succeeded, 1 failed, 0 cancelled; 4 restarts. Now: 5 queued, 1 placed or running.
"""


def test_metrics(koala: Koala) -> None:
    assert koala("metrics").out == METRICS
    assert json.loads(koala("metrics", "--since", "1800", "--json").out)["clusters"][0]["utilisation"] == 1.0
    assert koala("metrics", "--since", "0").code == 2


def test_where_no_cluster_is(koala: Koala) -> None:
    assert koala("local-run", "nroth", "1", "true").code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("submit", "--flexible", "20", "x"), 2, "koala: --flexible is 20, but the whole grid has 8 nodes"),
        (("submit", "--flexible", "x", "x"), 2, "koala: Invalid value for '--flexible': 'x' is not a"),
        (("submit", "--flexible", "6", "--split", "4,3", "x"), 2, "koala: --split 4,3 sums to 7"),
        (("submit", "--flexible", "2", "--min-component", "3", "x"), 2, "koala: --min-component is 3"),
        (("submit", "--fixed", "north:1,nroth:1", "x"), 2, "koala: --fixed: cluster of component 1 is nroth"),
        (("submit", "--nonfixed", "1,5", "x"), 2, "koala: --nonfixed: size of component 1 is 5"),
        (("submit", "--nonfixed", "4,4,4", "x"), 2, "koala: --nonfixed: the components need 12 nodes"),
        (("submit", "--flexible", "6", "--ppn", "0", "x"), 2, "koala: --ppn is 0"),
        (("submit", "--flexible", "6", "--walltime", "soon", "x"), 2, "koala: --walltime is 'soon', no duration"),
        (("submit", "--flexible", "6", "--policy-option", "metric", "x"), 2, "koala: --policy-option is 'metric'"),
        (("submit", "--flexible", "6", "--coallocation", "no", "x"), 2, "koala: --coallocation is 'no'"),
        (("submit", "--flexible", "6", "--coallocation", "0", "x"), 2, "koala: --coallocation is 0, no co-allocation"),
        (
            ("submit", "--flexible", "6", "--claiming", "x", "x"),
            2,
            "koala: Invalid value for '--claiming': 'x'; known: a",
        ),
        (("submit", "--flexible", "6", "--claim-threshold", "2", "x"), 2, "koala: --claim-threshold is 2"),
        (("submit", "--flexible", "6", "--speed-ratio-min", "-1", "x"), 2, "koala: --speed-ratio-min is -1"),
        (("submit", "--flexible", "6", "--max-claiming-tries", "0", "x"), 2, "koala: --max-claiming-tries is 0"),
        (("submit", "--flexible", "6", "--retry-on-exit", "300", "x"), 2, "koala: --retry-on-exit is 300"),
        (("submit", "--flexible", "6"), 2, "koala: command is empty"),
        (("submit", "x"), 2, "koala: the request has no nodes"),
        (("submit", "-f", "/nowhere.yaml"), 2, "koala: cannot read /nowhere.yaml"),
        (("show", "9"), 3, "koala: there is no job 9"),
        (("show", "nine"), 2, "koala: Invalid value for 'JOB': 'nine' is not a valid whole number"),
        (("logs", "9", "-f"), 3, "koala: there is no job 9"),
        (("wait", "9"), 3, "koala: there is no job 9"),
        (("queue", "--state", "runing"), 2, "koala: Invalid value for '--state': 'runing'; did you mean running? "),
        (("nonsense",), 2, "koala: No such command 'nonsense'"),
        (("show", "1", "--url", "localhost"), 2, "koala: localhost is not a URL"),
        (("show", "1", "--url", "http://127.0.0.1:1"), 5, "koala: no daemon answers at http://127.0.0.1:1"),
    ],
)
def test_an_error_is_one_line_with_the_way_out(koala: Koala, arguments: tuple[str, ...], code: int, says: str) -> None:
    done = koala(*arguments)
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.startswith(says), done.err
    assert done.err.count("\n") == 1
    assert ";" in done.err


def test_a_field_of_the_file_is_named_as_the_file_has_it(koala: Koala, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("request: {type: flexible, total_size: 20}\ncommand: [x]\n")
    assert koala("submit", "-f", str(file)).err.startswith("koala: request.total_size is 20")
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [x]\nnmae: x\n")
    done = koala("submit", "-f", str(file))
    assert done.err.startswith("koala: unknown field nmae; did you mean name?")
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [x]\nname: 2026-01-01\n")
    assert koala("submit", "-f", str(file)).code == 2
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [x]\nenvironment: [A]\n")
    assert koala("submit", "-f", str(file), "--env", "B=1").code == 2


def test_a_token_is_shown(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tokens=("another-long-secret",))
    server.start()
    try:
        refused = koala("queue", "--url", server.url)
        assert (refused.code, refused.err.count("\n")) == (4, 1)
        assert "correct KOALA_TOKEN or --token" in refused.err
        monkeypatch.setenv("KOALA_TOKEN", "another-long-secret")
        assert koala("queue", "--url", server.url).code == 0
    finally:
        server.end()


def test_what_people_write_cannot_play_with_the_terminal(koala: Koala, server: Server) -> None:
    koala(*FLEXIBLE, "--", "program", "\x1b[2J\nsecond line")
    page = koala("show", "1").out
    assert "\x1b" not in page
    assert "?[2J second line" in page
