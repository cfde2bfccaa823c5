"""Shells complete jobs, clusters, policies, users and states: what is offered, and what real shells make of it."""

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
from tests.cli.test_process import environment
from tests.needs import FISH, ZSH, needs

Offered = Callable[..., dict[str, str]]
OTHERWISE = {"koala workload generate": {"jobs"}, "koala check": {"user"}, "koala local-run": {"user"}}
"""Names that are none of the daemon's."""
SHELLS = ["bash", pytest.param("zsh", marks=needs(ZSH)), pytest.param("fish", marks=needs(FISH))]


@pytest.fixture
def offered(koala: Koala, monkeypatch: pytest.MonkeyPatch) -> Offered:
    """What a shell is told that may stand for the last of some words, with what is said of each."""

    def ask(*words: str, timeouts: ClientTimeouts = PATIENT) -> dict[str, str]:
        with monkeypatch.context() as shell:
            shell.setenv("_KOALA_COMPLETE", "zsh_complete")
            shell.setenv("COMP_WORDS", " ".join(["koala", *words]))
            shell.setenv("COMP_CWORD", str(len(words)))
            done = koala(timeouts=timeouts)
        assert (done.code, done.err) == (0, "")
        lines = done.out.strip("\n").splitlines()
        return {word: told for kind, word, told in zip(*[iter(lines)] * 3, strict=True) if kind == "plain"}

    return ask


def submitted(koala: Koala, name: str, *more: str) -> None:
    assert koala("submit", "--flexible", "2", "--name", name, *more, "--", "program").code == 0


def test_jobs_are_offered_by_what_can_be_done_with_them(koala: Koala, offered: Offered) -> None:
    submitted(koala, "first")
    submitted(koala, "second")
    submitted(koala, "third")
    koala("cancel", "1")
    koala("hold", "2")
    assert list(offered("show", "")) == ["3", "2", "1"]
    assert list(offered("cancel", "")) == ["3", "2"]
    assert list(offered("cancel", "3", "")) == ["2"], "each once"
    assert list(offered("hold", "")) == ["3"]
    assert list(offered("release", "")) == ["2"]
    assert "second" in offered("release", "")["2"]
    assert offered("show", "4") == {}


def test_clusters_policies_states_and_users_are_offered(koala: Koala, offered: Offered) -> None:
    submitted(koala, "mine")
    submitted(koala, "his", "--owner", "bob")
    assert list(offered("clusters", "drain", "")) == ["north", "south"]
    assert list(offered("network", "measure", "north", "")) == ["south"]
    assert list(offered("queue", "--cluster", "s")) == ["south"]
    assert list(offered("queue", "--cluster=s")) == ["--cluster=south"], "whole words, where = parts none"
    assert list(offered("submit", "--policy", "wo")) == ["worst-fit"]
    assert list(offered("queue", "--state", "ru")) == ["running"]
    assert {"bob"} <= set(offered("queue", "--user", ""))
    assert list(offered("limits", "--user", "bo")) == ["bob"]
    assert "--watch" in offered("queue", "--w")


def test_what_others_have_named_is_one_plain_word_or_nothing(server: Server, koala: Koala, offered: Offered) -> None:
    submitted(koala, "a, `b` $(c) *")
    record = server.service.records[1]
    for number, owner in enumerate(["$(rm)", "*", "a b", "-rf", "a\nb", "fine"], 2):
        server.service.records[number] = replace(record, id=number, spec=replace(record.spec, owner=owner))
    assert {"fine", "ada"} & set(offered("queue", "--user", "")) == {"fine", "ada"}
    assert not {"$(rm)", "*", "a b", "-rf", "a\nb"} & set(offered("queue", "--user", ""))
    (told,) = (told for job, told in offered("cancel", "").items() if job == "1")
    assert "," not in told


def test_a_daemon_that_is_away_slow_or_strange_is_no_error(
    koala: Koala, offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOALA_TOKEN", "wrong")
    assert offered("cancel", "") == {}
    monkeypatch.setenv("KOALA_URL", "http://127.0.0.1:1")
    assert offered("cancel", "") == {}
    assert offered("cancel", "--url", "no url", "") == {}
    assert "--reason" in offered("cancel", "--r")


def test_a_daemon_that_says_nothing_keeps_nobody_waiting(offered: Offered, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KOALA_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert offered("clusters", "drain", "", timeouts=ClientTimeouts(completion_s=0.2)) == {}


def test_each_job_cluster_policy_and_user_is_completed() -> None:
    known = {"job", "jobs", "cluster", "policy", "user", "owner"}
    asked = {}
    for path, command in commands().items():
        for given in command.params:
            how = given._custom_shell_complete
            if isinstance(how, partial):
                asked[path, given.name] = how.args[0]
            else:
                assert given.name not in known - OTHERWISE.get(path, set()), f"{path} {given.name}"
    assert set(asked.values()) == {"files", *completion.OFFERS}
    assert asked["koala submit", "policy"] == "policies"


@pytest.mark.processes
@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes_them(koala: Koala, server: Server, tmp_path: Path, shell: str) -> None:
    submitted(koala, "first")
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
    words = {"bash": ["--norc", "-i"], "zsh": ["-i"], "fish": ["-i"]}[shell]
    with Terminal([shutil.which(shell) or shell, *words], environment(server.url, **home), 120, 30) as terminal:
        source = (
            "koala --show-completion fish | source" if shell == "fish" else f'eval "$(koala --show-completion {shell})"'
        )
        terminal.type(f"{source}; echo rea''dy\n")
        terminal.expect("ready\r?\n")
        for typed, becomes in (
            ("koala clusters drain n", "orth"),
            ("koala submit --policy clo", "se-to-files"),
            ("koala queue --state=ru", "nning"),
        ):
            terminal.type(f"{typed}\t")
            terminal.expect(becomes)
            terminal.type("\x15")
        terminal.type("koala cancel \t")
        terminal.expect("cancel[^\x00]*?(?<![0-9;\\[])1(?![0-9;m])")
