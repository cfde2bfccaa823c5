"""Conversion of options and job files to submissions."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.cli.jobs.submission import (
    RequestOptions,
    clauses_of,
    environment_of,
    exported_variables,
    read_job_file,
    read_options,
    request_of,
)
from koalapy.client.errors import Exit, GridError
from koalapy.client.submission import build_body, with_time_zone
from koalapy.model.command_line import command_for
from tests.cli.conftest import Koala


def make_request(**options: Any) -> Any:
    return request_of(RequestOptions(**options))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "echo", "caf\udce9"], "command[1] is 'caf\\udce9'"),
        (["--env", "A=\udcff", "--", "true"], "environment.A is '\\udcff'"),
        (["--env", "\udcff=a", "--", "true"], "--env is '\\udcff'"),
        (["--name", "\udcff", "--", "true"], "--name is '\\udcff'"),
    ],
)
def test_submit_of_text_not_utf8_names_its_field(koala: Koala, arguments: list[str], says: str) -> None:
    ended = koala("submit", "--flexible", "2", *arguments)
    assert ended.code == Exit.USAGE
    assert ended.err.startswith(f"koala: {says}, which is not valid UTF-8")


def test_job_file_with_lone_surrogate_names_its_field(koala: Koala, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text('request: {type: flexible, total_size: 2}\ncommand: ["true"]\nworkdir: "/a\\ud800"\n')
    ended = koala("submit", "-f", str(file))
    assert (ended.code, ended.err) == (
        Exit.USAGE,
        "koala: workdir is '/a\\ud800', which is not valid UTF-8; write it in UTF-8\n",
    )


def test_request_of_converts_each_kind() -> None:
    assert make_request(flexible=6) == {"type": "flexible", "total_size": 6}
    assert make_request(flexible=6, min_component=2, max_components=3, split=["4,2", "3,3"]) == {
        "type": "flexible",
        "total_size": 6,
        "min_component_size": 2,
        "max_components": 3,
        "split_options": [[4, 2], [3, 3]],
    }
    assert make_request(nonfixed="2,4") == {"type": "nonfixed", "components": [{"size": 2}, {"size": 4}]}
    assert make_request(fixed="north:2,south:4") == {
        "type": "fixed",
        "components": [{"cluster": "north", "size": 2}, {"cluster": "south", "size": 4}],
    }
    assert make_request() is None


def test_options_override_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("request: {type: flexible, total_size: 2}\nname: mine\ncommand: [a]\nenvironment: {X: 1, Y: 2}\n")
    body = build_body(read_job_file(file)[0], {"name": "other", "command": None}, {"Y": "3"})
    assert (body["name"], body["command"], body["environment"]) == ("other", ["a"], {"X": 1, "Y": "3"})


def test_chdir_option_overrides_optional_workdir_of_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [a]\nworkdir: /a\nworkdir_optional: true\n")
    assert build_body(read_job_file(file)[0], {}, {})["workdir_optional"] is True
    body = build_body(read_job_file(file)[0], {"workdir": "/b"}, {})
    assert (body["workdir"], body.get("workdir_optional", False)) == ("/b", False)


BOMB = "\n".join(["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11))])


@pytest.mark.parametrize("content", ["- 1", "a: [", "\xff", "a: 2026-13-45", f"a: {'9' * 5000}", "a: !!bool x", BOMB])
def test_invalid_job_file_is_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(GridError) as refusal:
        build_body(read_job_file(file)[0], {}, {})
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "contains no job"),
        ("# nothing\n---\n", "contains no job"),
        ("- 1", "is not a job: it has no names of fields"),
    ],
)
def test_job_file_without_job_shows_what_to_write(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(GridError) as refusal:
        read_job_file(file)
    assert refusal.value.message == f"{file} {problem}"
    example = refusal.value.hint.removeprefix("give fields and values: ")
    file.write_text(example)
    assert read_job_file(file) == [{"request": {"type": "flexible", "total_size": 2}, "command": ["hostname"]}]


def test_job_file_is_read_up_to_its_limit() -> None:
    with pytest.raises(GridError) as refusal:
        build_body(read_job_file(Path("/dev/zero"))[0], {}, {})
    assert str(refusal.value) == "/dev/zero is larger than 1048576 bytes; put large data into files that the job reads"


def test_job_file_with_alias_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("request: {type: flexible, total_size: 2}\ncommand: [ls, &a x, *a]\n")
    with pytest.raises(GridError) as refusal:
        build_body(read_job_file(file)[0], {}, {})
    hint = "write its value instead, or put it in quotes"
    assert (refusal.value.code, refusal.value.message, refusal.value.hint) == (
        Exit.USAGE,
        f"{file} has an alias (*NAME)",
        hint,
    )


def test_environment_of_reads_values_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "yes")
    assert environment_of(["A=1=2", "B=", "HERE"]) == {"A": "1=2", "B": "", "HERE": "yes"}


@pytest.mark.parametrize(
    ("text", "exported"),
    [
        (None, {}),
        ("NONE", {}),
        ("ALL", {"HERE": "yes", "PATH": "/bin"}),
        ("HERE,A=1=2,B=", {"HERE": "yes", "A": "1=2", "B": ""}),
        ("ALL,HERE=no,HOME", {"HERE": "no", "PATH": "/bin", "HOME": "/root"}),
    ],
)
def test_exported_variables_are_those_of_slurm(
    monkeypatch: pytest.MonkeyPatch, text: str | None, exported: dict[str, str]
) -> None:
    local = {"HOME": "/root", "KOALA_TOKEN": "secret", "SLURM_JOB_ID": "3", "BASH_FUNC_x%%": "() { :; }", "_": "koala"}
    monkeypatch.setattr(os, "environ", local | {"HERE": "yes", "PATH": "/bin"})
    assert exported_variables(text) == exported


def test_label_of_job_file_stays_without_option() -> None:
    fields = {"label": True, "request": {"type": "flexible", "total_size": 1}}
    assert build_body(fields, read_options({"label": False}), {})["label"] is True
    body = {"request": {"type": "flexible", "total_size": 1}, "command": ["true"], "label": True, "output": "o"}
    command = "koala submit --flexible 1 --output o --label -- true"
    assert command_for(body, "/") == command
    assert command_for(body | {"label": False}, "/") == command.replace(" --label", "")


def test_submit_of_one_node_uses_singular(koala: Koala) -> None:
    assert "flexible, 1 node, low priority" in koala("submit", "--flexible", "1", "--", "true").out
    assert "flexible, 1 node, low priority" in koala("show", "1").out


EMPTY = "walltime policy name owner home-site signal output application per-node-bandwidth memory mail-user webhook"


@pytest.mark.parametrize("option", [*EMPTY.split(), "chdir", "env", "stage", "collect", "idempotency-key", "file"])
def test_submit_with_empty_option_is_rejected(koala: Koala, option: str) -> None:
    ended = koala("submit", "--flexible", "2", f"--{option}", "", "--", "true")
    assert ended.code == Exit.USAGE
    assert f"--{option}" in ended.err
    assert "it is empty: give a value, or leave the option out; see koala submit --help" in ended.err
    assert koala("queue", "--all", "-q").out == "", "nothing was submitted"


@pytest.mark.parametrize("key", ["a\n", "a\rb", "a\0", "\x7f", "\udcff", " "])
def test_idempotency_key_invalid_in_header_is_rejected(koala: Koala, key: str) -> None:
    ended = koala("submit", "--flexible", "2", "--idempotency-key", key, "--", "true")
    assert (ended.code, ended.out) == (Exit.USAGE, "")
    assert ended.err.startswith(
        "koala: --idempotency-key is blank, or has characters that a header does not allow; use "
    )


def test_idempotency_key_may_have_any_letters(koala: Koala) -> None:
    ended = [koala("submit", "--flexible", "2", "-q", "--idempotency-key", "é 鍵", "--", "true") for _ in range(2)]
    assert [(result.code, result.out) for result in ended] == [(0, "1\n")] * 2


def test_job_file_with_duplicate_key_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "request: {type: flexible, total_size: 2}\nrequest: {type: flexible, total_size: 3}\ncommand: [x]\n"
    )
    with pytest.raises(GridError) as refusal:
        build_body(read_job_file(file)[0], {}, {})
    assert (refusal.value.code, str(refusal.value)) == (
        Exit.USAGE,
        f"cannot read {file}: the key 'request' is given twice, in lines 1 and 2: leave one out",
    )


JOBS = """\
request: {type: flexible, total_size: 2}
command: [echo, a]
---
request: {type: flexible, total_size: 3}
command: [exit, "7"]
name: second
---
"""


def test_submit_with_several_documents_submits_them_together(koala: Koala, tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(JOBS)
    assert koala("submit", "-f", str(file)).out == "Submitted 2 jobs: 1 to 2\n"
    assert koala("submit", "-f", str(file), "-q", "--application", "app").out == "3\n4\n"
    jobs = [json.loads(koala("show", job, "--json").out) for job in "34"]
    assert [(job["name"], job["application"], job["request"]["total_size"]) for job in jobs] == [
        ("", "app", 2),
        ("second", "app", 3),
    ]
    assert json.loads(koala("submit", "-f", str(file), "--json").out) == {"jobs": [5, 6]}
    waited = koala("submit", "-f", str(file), "--wait")
    assert (waited.code, waited.err) == (7, "Submitted 2 jobs: 7 to 8\n")
    assert waited.out.splitlines() == ["job 7 succeeded", "job 8 failed: the program failed"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "koala: document 2 of {file}: request.total_size is 9, but "),
        (["--flexible", "10"], "koala: document 1 of {file}: --flexible is 10, but "),
        (["--dry-run"], "koala: --dry-run shows one job, and {file} has 2; give a file with one job"),
    ],
)
def test_submit_with_wrong_document_names_it(koala: Koala, tmp_path: Path, options: list[str], error: str) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(JOBS.replace("3", "9"))
    ended = koala("submit", "-f", str(file), *options)
    assert (ended.code, ended.out) == (Exit.USAGE, "")
    assert ended.err.startswith(error.format(file=file))
    assert koala("queue", "--all", "-q").out == ""


def test_job_file_with_document_of_other_type_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{JOBS}[1]\n")
    with pytest.raises(GridError) as refusal:
        read_job_file(file)
    assert refusal.value.message == f"document 3 of {file} is not a job: it has no names of fields"


@pytest.fixture
def clock_of_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("clock_of_new_york")
@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("2026-12-01T16:00", "2026-12-01T16:00:00-05:00"),
        ("2026-12-01T16:00Z", "2026-12-01T11:00:00-05:00"),
        ("now+1h", "now+1h"),
        ("soon", "soon"),
        ("90", "90"),
    ],
)
def test_times_are_sent_in_the_time_zone_of_the_user(text: str, sent: str) -> None:
    request = {"type": "flexible", "total_size": 1}
    assert with_time_zone(text) == sent
    assert build_body({"request": request, "begin": text}, {}, {})["begin"] == sent


def test_after_option_separates_entries_by_commas() -> None:
    assert clauses_of(["7, 8?9:any", "3:failed"]) == ["7", "8?9:any", "3:failed"]


@pytest.mark.parametrize("words", [["hostname", "x"], ["--", "env", "--", "x"], ["--", "hostname", "south:2", "--"]])
def test_words_after_dashes_are_command(koala: Koala, words: list[str]) -> None:
    assert koala("submit", "--flexible", "1", "-q", *words).code == 0
    command = words[1:] if words[0] == "--" else words
    assert json.loads(koala("show", "--json").out)["command"] == command


def test_dashes_after_script_are_argument_of_script(koala: Koala, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#KOALA --flexible 1\n")
    assert koala("submit", "-q", str(script), "x", "--", "y").code == 0
    assert json.loads(koala("show", "--json").out)["command"][1:] == ["x", "--", "y"]
