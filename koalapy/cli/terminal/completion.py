"""Shell completion of jobs, clusters, policies, users, files and tokens from the daemon.

The daemon has little time to respond, and errors are not printed, since the user has only pressed Tab. Completions with
characters that need quoting in a shell are omitted.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from koalapy.client.answers import ListedJob
from koalapy.client.client import Client, nodes_of
from koalapy.client.errors import CliError, printable
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts, TimeIsUp, until
from koalapy.model.wording import format_nodes

Offer = tuple[str, str]
"""A completion and its description."""
__all__ = ["complete", "get_completion_class", "install", "shell_complete"]
MAX_JOBS = 100
"""Maximum number of offered jobs, the newest ones."""
MAX_HELP_LENGTH = 60
"""Maximum length of a description in characters."""
PLAIN_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+/-]*")
"""Words that need no quoting in any shell."""


def complete(what: str, context: click.Context, given: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return completions of a word; ``what`` is a key of ``OFFERS``, or ``files``."""
    if what == "files":
        return [CompletionItem(incomplete, type="file")]
    already = context.params.get(given.name or "") or ()
    there = {str(one) for one in already} if isinstance(already, tuple) else set()
    try:
        timeouts = context.find_object(ClientTimeouts) or DEFAULT_TIMEOUTS
        with context.scope(cleanup=False), until(time.monotonic() + timeouts.completion_s):
            client = Client(context.params.get("url"), context.params.get("token"), timeouts=timeouts)
            offered = [one for one in OFFERS[what](client, incomplete) if one[0].startswith(incomplete)]
    except (CliError, TimeIsUp, KeyError, TypeError, ValueError):
        return []
    return [
        CompletionItem(word, help=_help(told) or None)
        for word, told in offered
        if PLAIN_WORD.fullmatch(word) and word not in there
    ]


def _help(told: str) -> str:
    # Fish ends a description at a comma.
    short = printable(told).replace(",", ";")
    return short if len(short) <= MAX_HELP_LENGTH else f"{short[: MAX_HELP_LENGTH - 1]}…"


def _jobs(
    list_jobs: Callable[..., tuple[list[ListedJob], bool]] = Client.jobs, **query: object
) -> Callable[[Client, str], Sequence[Offer]]:
    """Offer listed jobs of the caller, or of all users if none of the caller's jobs begins with the word."""

    def offered(client: Client, incomplete: str) -> Sequence[Offer]:
        for mine in (True, None):
            found, _ = list_jobs(client, MAX_JOBS, mine=mine, **query)
            if fitting := [_job(job) for job in found if str(job["id"]).startswith(incomplete)]:
                return fitting
        return []

    return offered


def _job(job: ListedJob) -> Offer:
    whose = job["name"] or job["program"][:30]
    return str(job["id"]), f"{job['state']}: {format_nodes(nodes_of(job['request']))} {whose} {job['owner']}"


def _clusters(client: Client, _: str) -> Iterable[Offer]:
    for cluster in client.clusters():
        yield cluster["name"], f"{cluster['state']}: {cluster['idle']} of {format_nodes(cluster['total'])} idle"


def _policies(client: Client, _: str) -> Iterable[Offer]:
    for policy in client.get("/api/v1/policies")["policies"]:
        yield policy["name"], policy["summary"]


def _users(client: Client, _: str) -> Iterable[Offer]:
    """Offer the owners of unfinished jobs that the caller may see."""
    owners = {job["owner"] for job in client.jobs(1000, active=True)[0] if job["owner"]}
    return [(owner, "") for owner in sorted(owners | {client.get("/api/v1/whoami")["user"]})]


def _replicas(client: Client, _: str) -> Iterable[Offer]:
    found = client.get("/api/v1/replicas", limit=1000)["replicas"]
    where: dict[str, list[str]] = {}
    for replica in found:
        where.setdefault(replica["name"], []).append(replica["cluster"])
    return [(name, f"on {' '.join(clusters)}") for name, clusters in where.items()]


def _tokens(client: Client, _: str) -> Iterable[Offer]:
    for token in client.get("/api/v1/tokens")["tokens"]:
        yield str(token["id"]), f"{token['user']} {token['role']} {token['note']}"


OFFERS: dict[str, Callable[[Client, str], Iterable[Offer]]] = {
    "jobs": _jobs(),
    "active jobs": _jobs(Client.unfinished_jobs),
    "queued jobs": _jobs(state="queued"),
    "held jobs": _jobs(state="held"),
    "clusters": _clusters,
    "policies": _policies,
    "users": _users,
    "replicas": _replicas,
    "tokens": _tokens,
}


class _Bash(BashComplete):
    """Completion for bash, which splits ``--option=value`` into three words: join them again."""

    # Quote the value, so that bash does not replace a completion by matching file names.
    source_template = BashComplete.source_template.replace("COMPREPLY+=($value)", 'COMPREPLY+=("$value")')

    def get_completion_args(self) -> tuple[list[str], str]:
        given, incomplete = super().get_completion_args()
        words: list[str] = []
        rest = iter(given)
        for word in rest:
            if word == "=" and words and words[-1].startswith("--") and (value := next(rest, None)) is not None:
                words[-1] += f"={value}"
            elif word != "=":
                words.append(word)
        return words, incomplete


class _WholeWords(ShellComplete):
    """Completion for shells that replace ``--option=value`` as one word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        option, equals, _ = incomplete.partition("=")
        found = super().get_completions(args, incomplete)
        if equals and option.startswith("--"):
            for item in found:
                item.value = f"{option}={item.value}"
        return found


class _Zsh(_WholeWords, ZshComplete):
    """Completion for zsh."""


class _Fish(_WholeWords, FishComplete):
    """Completion for fish."""


def install() -> None:
    """Register these completion classes with click."""
    for shell in (_Bash, _Zsh, _Fish):
        add_completion_class(shell)
