"""Jobs that commands select: the last one, or by name, owner and state."""

import io
import json
import sys

import pytest

from koalapy.client.errors import Exit
from tests.cli.conftest import Koala, Server

FLEXIBLE = ("submit", "--flexible", "2")


def submit_named(koala: Koala, *names: str) -> None:
    for name in names:
        assert koala(*FLEXIBLE, "--name", name, "program").code == 0


def states(koala: Koala) -> dict[str, str]:
    jobs = json.loads(koala("queue", "--all", "--json", *("--state=queued", "--state=held", "--state=cancelled")).out)
    return {job["name"]: job["state"] for job in jobs["jobs"]}


def test_show_logs_wait_and_explain_take_last_job(koala: Koala) -> None:
    koala(*FLEXIBLE, "echo", "first")
    koala(*FLEXIBLE, "--name", "second", "--", "echo", "second")
    assert json.loads(koala("show", "--json").out)["id"] == 2
    assert koala("logs").out == "second\n"
    assert koala("wait").out == "job 2 succeeded\n"
    assert json.loads(koala("explain", "--json").out)["job"] == 2
    assert koala("wait", "--last", "--dry-run").out == "koala wait would act on job 2\n"


@pytest.mark.parametrize("command", ["show", "logs", "wait", "explain"])
def test_last_job_without_jobs_is_not_found(koala: Koala, command: str) -> None:
    ended = koala(command)
    assert (ended.code, ended.out) == (Exit.NOT_FOUND, "")
    assert ended.err == "koala: you have no jobs; submit one with koala submit, or give a job's id\n"


def test_selection_by_name_and_state_acts_on_matching_jobs(koala: Koala) -> None:
    submit_named(koala, "study-1", "study-2", "other")
    held = koala("hold", "--name", "study-*")
    assert (held.out, held.err) == ("job 1 held\njob 2 held\n", "koala: selected 2 jobs: 1 2\n")
    assert koala("priority", "high", "--state", "queued").out == "job 3 queued, high priority\n"
    assert koala("cancel", "--state", "held,queued", "--name", "*-2").out == "job 2 cancelled\n"
    assert states(koala) == {"study-1": "held", "study-2": "cancelled", "other": "queued"}
    assert koala("release", "--mine").out == "job 1 queued\n"
    assert koala("cancel", "--mine", "--dry-run").out == "koala cancel would act on 2 jobs: 1 3\n"
    assert json.loads(koala("cancel", "--mine", "--dry-run", "--json").out) == {"action": "cancel", "jobs": [1, 3]}
    assert koala("cancel", "--mine").code == 0
    assert set(states(koala).values()) == {"cancelled"}
    nothing = koala("cancel", "--mine")
    assert (nothing.code, nothing.err) == (
        Exit.NOT_FOUND,
        "koala: no job that koala cancel can change matches --mine\n",
    )
    assert koala("wait", "--name", "x").err == "koala: no unfinished job matches --name x\n"


def test_selection_by_user_acts_on_jobs_of_this_user_only(koala: Koala) -> None:
    koala(*FLEXIBLE, "--owner", "ada", "--name", "a", "program")
    koala(*FLEXIBLE, "--owner", "bob", "--name", "b", "program")
    assert koala("hold", "--user", "bob").out == "job 2 held\n"
    assert koala("release", "-u", "bob").err == "koala: selected job 2\n"
    assert koala("priority", "high", "-u", "bob").code == 0
    dry_run = koala("wait", "-u", "bob", "--dry-run")
    assert dry_run.out == "koala wait would act on job 2\n"
    assert koala("cancel", "-u", "bob").out == "job 2 cancelled\n"
    assert states(koala) == {"a": "queued", "b": "cancelled"}
    nothing = koala("cancel", "-u", "bob")
    assert (nothing.code, nothing.err) == (
        Exit.NOT_FOUND,
        "koala: no job that koala cancel can change matches --user bob\n",
    )


class Terminal(io.StringIO):
    """Standard input at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "question"), [([], "cancel job 2 (b), queued? [y/N] "), (["--mine"], "cancel 2 jobs: 1 2? [y/N] ")]
)
def test_cancel_on_terminal_asks_first(
    koala: Koala, monkeypatch: pytest.MonkeyPatch, arguments: list[str], question: str
) -> None:
    submit_named(koala, "a", "b")
    for answer in ("\n", "n\n", ""):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        refused = koala("cancel", *arguments)
        assert (refused.code, refused.out) == (Exit.USAGE, "")
        assert refused.err.startswith(f"{question}koala: nothing was cancelled; ")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert koala("cancel", *arguments).out.endswith("job 2 cancelled\n")


@pytest.mark.parametrize("arguments", [["--last"], ["2"], ["--name", "b", "--yes"]])
def test_cancel_on_terminal_with_explicit_choice_does_not_ask(
    koala: Koala, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    submit_named(koala, "a", "b")
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert koala("cancel", *arguments).out == "job 2 cancelled\n"
    assert states(koala)["a"] == "queued"


def test_actions_as_json_print_results_and_exit_with_worst_code(koala: Koala, server: Server) -> None:
    submit_named(koala, "a")
    ended = koala("cancel", "1", "9", "--json")
    results = json.loads(ended.out)["jobs"]
    assert (ended.code, ended.err) == (Exit.NOT_FOUND, "")
    assert [(result["job"], result["state"]) for result in results] == [(1, "cancelled"), (9, None)]
    assert results[1]["problem"]["code"] == "not-found"
    drained = json.loads(koala("clusters", "drain", "south", "--reason", "x", "--json").out)
    assert (drained["name"], drained["state"]) == ("south", "drained")
    assert json.loads(koala("clusters", "resume", "south", "--json").out)["state"] == "unusable"
    assert json.loads(koala("clusters", "clear", "south", "--json").out)["state"] == "usable"


def test_drain_without_reason_asks_for_it_on_terminal_only(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = koala("clusters", "drain", "south")
    assert (refused.code, refused.out) == (Exit.USAGE, "")
    assert "reason" in refused.err
    for answer in ("", "  \n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        refused = koala("clusters", "drain", "south")
        assert refused.code == Exit.USAGE
        assert refused.err.startswith("Reason, which others will see: koala: reason")
    monkeypatch.setattr(sys, "stdin", Terminal("new disks\n"))
    assert koala("clusters", "drain", "south").out.startswith("cluster south is drained")
    assert "by ada: new disks" in koala("clusters").out
