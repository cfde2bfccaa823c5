"""Commands on arrays and their tasks, against a daemon without nodes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from koalapy.cli.main import main
from tests.cli.conftest import CommandResult
from tests.daemon_in_process import ServedDaemon, daemon_in_thread
from tests.serving import TOKEN

ONE_NODE = ("--flexible", "1", "--launcher", "processes")
Command = Callable[..., CommandResult]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ServedDaemon]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # standard output is for commands
    with daemon_in_thread(tmp_path / "koala.db") as served:
        yield served


@pytest.fixture
def command(daemon: ServedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command on the daemon."""
    monkeypatch.setenv("KOALA_URL", daemon.url)
    monkeypatch.setenv("KOALA_TOKEN", TOKEN)

    def run(*arguments: str) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["koala", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return CommandResult(exit_.value.code, out, err)

    return run


def test_array_is_submitted_listed_shown_and_cancelled(command: Command) -> None:
    submitted = command("submit", *ONE_NODE, "--array", "1-200%16", "--", "true")
    assert submitted.out == "Submitted job 1: 200 tasks, each flexible, 1 node, low priority\n"
    listed = command("queue").out.splitlines()
    assert len(listed) == 2
    assert "200 waiting; " in listed[1]
    page = command("show", "1").out
    assert "array  1-200%16: 200 waiting" in page
    assert not [row for row in ("queued  ", "start-up  ", "tries  ", "CPU used  ") if f" {row}" in page]
    shown = command("show", "1[3]").out
    assert "job  4\n" in shown
    assert "task  1[3]\n" in shown
    assert command("queue", "--tasks", "1").err == "koala: no task of array 1 has started; 200 wait\n"
    assert command("cancel", "1[3-9]", "1[20]").out == "job 1[3-9] is being cancelled\njob 1[20] is being cancelled\n"
    assert "192 waiting, 8 cancelled" in command("queue").out
    answer = command("queue", "--tasks", "1")
    assert answer.err == (
        "koala: no task of array 1 runs; it has 192 waiting, 8 cancelled; --state lists ended tasks, as in "
        "--state succeeded\n"
    )
    answer = command("queue", "--tasks", "1", "--state", "failed")
    assert answer.err == "koala: no started task of array 1 is failed; it has 192 waiting, 8 cancelled\n"
    assert command("cancel", "1").out == "job 1 cancelled\n"
    waited = command("wait", "1")
    assert waited.code == 1
    assert waited.out.startswith("job 1 cancelled: cancelled by ")


def test_each_line_of_a_file_becomes_a_task(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("a\nb\n")
    assert command("submit", *ONE_NODE, "-q", "--each-line", str(file), "--", "true").out == "1\n"
    assert "array  1-2: 2 waiting" in command("show", "1").out
    file.write_bytes(b"\xff\n")
    assert command("submit", *ONE_NODE, "--each-line", str(file), "--", "true").err.endswith(
        "lines is not text in UTF-8; convert it\n"
    )
    file.write_text("")
    assert (
        "is empty; give a file with a line for each task"
        in command("submit", *ONE_NODE, "--each-line", str(file), "--", "true").err
    )
    assert "cannot read" in command("submit", *ONE_NODE, "--each-line", str(tmp_path / "none"), "--", "true").err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("queue", "--user", "x" * 500), "--user is 'xxx"),
        (("history", "--until", "soon"), "--until is 'soon', which is no time"),
        (("history", "--name", "x" * 500), "--name is 'xxx"),
    ],
)
def test_rejected_values_are_named_by_their_options(command: Command, arguments: tuple[str, ...], error: str) -> None:
    answer = command(*arguments)
    assert (answer.code, answer.err[: len(error) + 7]) == (2, f"koala: {error}")


def test_tasks_of_a_job_that_is_no_array_are_refused(command: Command) -> None:
    command("submit", *ONE_NODE, "--", "true")
    listed = command("queue", "--tasks", "1")
    assert (listed.code, listed.err) == (2, "koala: job 1 is not an array; see koala show 1\n")
    assert command("queue", "--tasks", "2").code == 3


MANY_LINES = "give --array 1-N, and let each task read its line of the file"


def test_submit_with_endless_or_large_lines_names_the_option_and_the_limit(command: Command, tmp_path: Path) -> None:
    endless = command("submit", *ONE_NODE, "--each-line", "/dev/zero", "--", "true")
    assert (endless.code, endless.err) == (
        2,
        f"koala: --each-line: /dev/zero is larger than 1048576 bytes; {MANY_LINES}\n",
    )
    file = tmp_path / "lines"
    file.write_text("\n" * 600_000)
    many = command("submit", *ONE_NODE, "--each-line", str(file), "--", "true")
    assert (many.code, many.err) == (
        2,
        f"koala: --each-line is 2400000 bytes, and a request has at most 1048576; {MANY_LINES}\n",
    )


def test_submit_with_too_large_request_names_the_largest_part(command: Command, tmp_path: Path) -> None:
    words = ["x" * 100_000] * 11
    large = command("submit", *ONE_NODE, "--", "true", *words)
    hint = "put large data into files that the job reads"
    problem = "the command is 1100052 bytes, and a request has at most 1048576"
    assert (large.code, large.err) == (2, f"koala: {problem}; {hint}\n")
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"each_line": ["x" * 100_000] * 10, "command": ["true"]}))
    large = command("submit", *ONE_NODE, "-f", str(file), "--export", f"A={'x' * 60_000}", "--env", "B=1")
    problem = "each_line in the job file is 1000040 bytes, and a request has at most 1048576"
    assert (large.code, large.err) == (2, f"koala: {problem}; {MANY_LINES}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("show", "1[9]"), 3, "array 1 has no task 9; its indices are 1-5"),
        (("show", "7[1]"), 3, "job 7 is not an array"),
        (("logs", "1[1-2]"), 2, "1[1-2] names 2 tasks; name one, as in 1[3]"),
        (("cancel", "1[8]"), 2, "array 1 has no task 8; its indices are 1-5"),
    ],
)
def test_wrong_tasks_are_refused(command: Command, arguments: tuple[str, ...], code: int, error: str) -> None:
    command("submit", *ONE_NODE, "--array", "1-5", "--", "true")
    command("submit", *ONE_NODE, "--", "true")
    result = command(*arguments)
    assert result.code == code
    assert error in result.err
