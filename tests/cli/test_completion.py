"""Shell completion of jobs, clusters, policies, users and states."""

import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from deploy.documentation.cli_page import commands
from koalapy.cli.terminal import completion
from koalapy.client.timeouts import ClientTimeouts
from tests.cli.conftest import PATIENT, Koala, Server
from tests.cli.terminal import Terminal
from tests.cli.test_process import make_environment
from tests.needs import FISH, ZSH, needs

Complete = Callable[..., dict[str, str]]
WITHOUT_COMPLETION = {"koala workload generate": {"jobs"}, "koala check": {"user"}, "koala local-run": {"user"}}
"""Parameters that do not name an object of the daemon, by command."""
SHELLS = ["bash", pytest.param("zsh", marks=needs(ZSH)), pytest.param("fish", marks=needs(FISH))]


@pytest.fixture
def complete_line(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Return the completions of the last argument, with their descriptions."""

    def ask(*arguments: str, timeouts: ClientTimeouts = PATIENT) -> dict[str, str]:
        with monkeypatch.context() as shell:
            shell.setenv("_KOALA_COMPLETE", "zsh_complete")
            shell.setenv("COMP_WORDS", " ".join(["koala", *arguments]))
            shell.setenv("COMP_CWORD", str(len(arguments)))
            result = koala(timeouts=timeouts)
        assert (result.code, result.err) == (0, "")
        lines = result.out.strip("\n").splitlines()
        return {
            completion: description
            for kind, completion, description in zip(*[iter(lines)] * 3, strict=True)
            if kind == "plain"
        }

    return ask


def submit_job(koala: Koala, name: str, *options: str) -> None:
    assert koala("submit", "--flexible", "2", "--name", name, *options, "--", "program").code == 0


def test_completion_offers_jobs_that_command_accepts(koala: Koala, complete_line: Complete) -> None:
    submit_job(koala, "first")
    submit_job(koala, "second")
    submit_job(koala, "third")
    koala("cancel", "1")
    koala("hold", "2")
    assert list(complete_line("show", "")) == ["3", "2", "1"]
    assert list(complete_line("cancel", "")) == ["3", "2"]
    assert list(complete_line("cancel", "3", "")) == ["2"], "each once"
    assert list(complete_line("hold", "")) == ["3"]
    assert list(complete_line("release", "")) == ["2"]
    assert "second" in complete_line("release", "")["2"]
    assert complete_line("show", "4") == {}


def test_completion_offers_clusters_policies_states_and_users(koala: Koala, complete_line: Complete) -> None:
    submit_job(koala, "mine")
    submit_job(koala, "his", "--owner", "bob")
    assert list(complete_line("clusters", "drain", "")) == ["north", "south"]
    assert list(complete_line("network", "measure", "north", "")) == ["south"]
    assert list(complete_line("queue", "--cluster", "s")) == ["south"]
    assert list(complete_line("queue", "--cluster=s")) == ["--cluster=south"], "the option is part of the word"
    assert list(complete_line("submit", "--policy", "wo")) == ["worst-fit"]
    assert list(complete_line("queue", "--state", "ru")) == ["running"]
    assert {"bob"} <= set(complete_line("queue", "--user", ""))
    assert list(complete_line("limits", "--user", "bo")) == ["bob"]
    assert "--watch" in complete_line("queue", "--w")


def test_completion_omits_names_that_need_quoting(server: Server, koala: Koala, complete_line: Complete) -> None:
    submit_job(koala, "a, `b` $(c) *")
    record = server.service.records[1]
    for number, owner in enumerate(["$(rm)", "*", "a b", "-rf", "a\nb", "fine"], 2):
        server.service.records[number] = replace(record, id=number, spec=replace(record.spec, owner=owner))
    assert {"fine", "ada"} & set(complete_line("queue", "--user", "")) == {"fine", "ada"}
    assert not {"$(rm)", "*", "a b", "-rf", "a\nb"} & set(complete_line("queue", "--user", ""))
    (description,) = (description for job, description in complete_line("cancel", "").items() if job == "1")
    assert "," not in description


def test_completion_without_daemon_offers_nothing(
    koala: Koala, complete_line: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOALA_TOKEN", "wrong")
    assert complete_line("cancel", "") == {}
    monkeypatch.setenv("KOALA_URL", "http://127.0.0.1:1")
    assert complete_line("cancel", "") == {}
    assert complete_line("cancel", "--url", "no url", "") == {}
    assert "--reason" in complete_line("cancel", "--r")


def test_completion_with_silent_daemon_times_out(complete_line: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KOALA_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert complete_line("clusters", "drain", "", timeouts=ClientTimeouts(completion_s=0.2)) == {}


def test_parameters_named_after_objects_have_completion() -> None:
    names = {"job", "jobs", "cluster", "policy", "user", "owner"}
    kinds = {}
    for path, command in commands().items():
        for parameter in command.params:
            how = parameter._custom_shell_complete
            if isinstance(how, partial):
                kinds[path, parameter.name] = how.args[0]
            else:
                assert parameter.name not in names - WITHOUT_COMPLETION.get(path, set()), f"{path} {parameter.name}"
    assert set(kinds.values()) == {"files", *completion.OFFERS}
    assert kinds["koala submit", "policy"] == "policies"


@pytest.mark.processes
@pytest.mark.parametrize("shell", SHELLS)
def test_completion_works_in_real_shell(koala: Koala, server: Server, tmp_path: Path, shell: str) -> None:
    submit_job(koala, "first")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "koala").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m koalapy.cli.main "$@"\n')
    (programs / "koala").chmod(0o755)
    (tmp_path / ".zshrc").write_text("autoload -Uz compinit; compinit -u -D\nunsetopt beep\n")
    home = {
        "HOME": str(tmp_path),
        "ZDOTDIR": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    arguments = {"bash": ["--norc", "-i"], "zsh": ["-i"], "fish": ["-i"]}[shell]
    with Terminal(
        [shutil.which(shell) or shell, *arguments], make_environment(server.url, **home), 120, 30
    ) as terminal:
        source = (
            "koala --show-completion fish | source" if shell == "fish" else f'eval "$(koala --show-completion {shell})"'
        )
        terminal.send_text(f"{source}; echo rea''dy\n")
        terminal.expect("ready\r?\n")
        for typed, becomes in (
            ("koala clusters drain n", "orth"),
            ("koala submit --policy clo", "se-to-files"),
            ("koala queue --state=ru", "nning"),
        ):
            terminal.send_text(f"{typed}\t")
            terminal.expect(becomes, again="\t")  # a slow machine may offer nothing within the time limit
            terminal.send_text("\x15")
        terminal.send_text("koala cancel \t")
        terminal.expect("cancel[^\x00]*?(?<![0-9;\\[])1(?![0-9;m])")
