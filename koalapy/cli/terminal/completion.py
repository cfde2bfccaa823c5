"""Shell completion of jobs, clusters, policies, users, files and tokens from the daemon.

The daemon has little time to respond, and errors are not printed, since the user has only pressed Tab. Completions with
characters that need quoting in a shell are omitted.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

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

from koalapy.cli.terminal.text import cut_text
from koalapy.client.client import Client, JobListing, nodes_of
from koalapy.client.errors import GridError, printable
from koalapy.client.http import Json
from koalapy.client.timeouts import DEFAULT_TIMEOUTS, ClientTimeouts, TimeIsUp, time_limit
from koalapy.model.wording import format_nodes

Offer = tuple[str, str]
"""A completion and its description."""
__all__ = ["complete_word", "get_completion_class", "install_shells", "shell_complete"]
MAX_JOBS = 100
"""Maximum number of offered jobs, the newest ones."""
MAX_HELP_LENGTH = 60
"""Maximum width of a description in columns."""
PLAIN_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+/-]*")
"""Words that need no quoting in any shell."""


def complete_word(
    kind: str, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return completions of a word; ``kind`` is a key of ``OFFERS``, or ``files``."""
    if kind == "files":
        return [CompletionItem(incomplete, type="file")]
    already = context.params.get(parameter.name or "") or ()
    present = {str(offer) for offer in already} if isinstance(already, tuple) else set()
    try:
        timeouts = context.find_object(ClientTimeouts) or DEFAULT_TIMEOUTS
        with context.scope(cleanup=False), time_limit(time.monotonic() + timeouts.completion_s):
            timeouts = replace(timeouts, daemon_start_s=0.0)
            client = Client(context.params.get("url"), context.params.get("token"), timeouts=timeouts)
            offered = [offer for offer in OFFERS[kind](client, incomplete) if offer[0].startswith(incomplete)]
    except (GridError, TimeIsUp, KeyError, TypeError, ValueError):
        return []
    # Fish ends a description at a comma.
    return [
        CompletionItem(text, help=cut_text(printable(description).replace(",", ";"), MAX_HELP_LENGTH) or None)
        for text, description in offered
        if PLAIN_WORD.fullmatch(text) and text not in present
    ]


def _make_jobs_offer(
    list_jobs: Callable[..., JobListing] = Client.list_jobs, **query: object
) -> Callable[[Client, str], Sequence[Offer]]:
    """Offer listed jobs of the caller, or of all users if none of the caller's jobs begins with the word."""

    def offer_jobs(client: Client, incomplete: str) -> Sequence[Offer]:
        for mine in (True, None):
            jobs = list_jobs(client, MAX_JOBS, mine=mine, **query).jobs
            if fitting := [_job_offer(job) for job in jobs if str(job["id"]).startswith(incomplete)]:
                return fitting
        return []

    return offer_jobs


def _job_offer(job: Json) -> Offer:
    label = job["name"] or job["program"][:30]
    return str(job["id"]), f"{job['state']}: {format_nodes(nodes_of(job['request']))} {label} {job['owner']}"


def _offer_clusters(client: Client, _: str) -> Iterable[Offer]:
    for cluster in client.clusters():
        yield cluster["name"], f"{cluster['state']}: {cluster['idle']} of {format_nodes(cluster['total'])} idle"


def _offer_policies(client: Client, _: str) -> Iterable[Offer]:
    for policy in client.get("/api/v1/policies")["policies"]:
        yield policy["name"], policy["summary"]


def _offer_users(client: Client, _: str) -> Iterable[Offer]:
    """Offer the owners of unfinished jobs that the caller may see."""
    owners = {job["owner"] for job in client.list_jobs(1000, active=True).jobs if job["owner"]}
    return [(owner, "") for owner in sorted(owners | {client.get("/api/v1/whoami")["user"]})]


def _offer_replicas(client: Client, _: str) -> Iterable[Offer]:
    replicas = client.get("/api/v1/replicas", limit=1000)["replicas"]
    clusters_by_name: dict[str, list[str]] = {}
    for replica in replicas:
        clusters_by_name.setdefault(replica["name"], []).append(replica["cluster"])
    return [(name, f"on {' '.join(clusters)}") for name, clusters in clusters_by_name.items()]


def _offer_tokens(client: Client, _: str) -> Iterable[Offer]:
    for token in client.get("/api/v1/tokens")["tokens"]:
        yield str(token["id"]), f"{token['user']} {token['role']} {token['note']}"


OFFERS: dict[str, Callable[[Client, str], Iterable[Offer]]] = {
    "jobs": _make_jobs_offer(),
    "active jobs": _make_jobs_offer(Client.unfinished_jobs),
    "queued jobs": _make_jobs_offer(state="queued"),
    "held jobs": _make_jobs_offer(state="held"),
    "clusters": _offer_clusters,
    "policies": _offer_policies,
    "users": _offer_users,
    "replicas": _offer_replicas,
    "tokens": _offer_tokens,
}


class _Bash(BashComplete):
    """Completion for bash, which splits ``--option=value`` into three words: join them again."""

    # Quote the value, so that bash does not replace a completion by matching file names.
    source_template = BashComplete.source_template.replace("COMPREPLY+=($value)", 'COMPREPLY+=("$value")')

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words and the incomplete one, with ``--option=value`` as one word."""
        split_words, incomplete = super().get_completion_args()
        joined_words: list[str] = []
        remaining = iter(split_words)
        for part in remaining:
            if (
                part == "="
                and joined_words
                and joined_words[-1].startswith("--")
                and (value := next(remaining, None)) is not None
            ):
                joined_words[-1] += f"={value}"
            elif part != "=":
                joined_words.append(part)
        return joined_words, incomplete


class _WholeWords(ShellComplete):
    """Completion for shells that replace ``--option=value`` as one word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return completions; repeat ``--option=`` before the value if the word contains it."""
        option, equals, _ = incomplete.partition("=")
        items = super().get_completions(args, incomplete)
        if equals and option.startswith("--"):
            for item in items:
                item.value = f"{option}={item.value}"
        return items


class _Zsh(_WholeWords, ZshComplete):
    """Completion for zsh."""


class _Fish(_WholeWords, FishComplete):
    """Completion for fish."""


def install_shells() -> None:
    """Register these completion classes with click."""
    for shell in (_Bash, _Zsh, _Fish):
        add_completion_class(shell)
