"""The search of every page, and the completion of its terms and values."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from fastapi import Response
from fastapi.responses import HTMLResponse, RedirectResponse
from markupsafe import Markup

from koalapy.api.access import Caller
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.pages.queue import Text
from koalapy.dashboard.rendering import with_query
from koalapy.model.identity import Identity, Role
from koalapy.model.job_search import KINDS, STATE_GROUPS, format_term
from koalapy.model.job_spec import Priority
from koalapy.validation.permissions import owns

MAX_COMPLETIONS = 12
KINDS_OF_JOBS = ("user", "name", "app")
"""The terms of which the unfinished jobs give the values."""
VALUES_LIFETIME_S = 5.0


def add_search(dashboard: Dashboard) -> None:
    """Add the search of every page and its completions."""
    queries = dashboard.engine.queries

    @dashboard.router.get("/search", operation_id="list_jobs")
    async def search(q: Text = "") -> Response:
        """Redirect to the job of a number, else to all jobs that a search finds, also ended ones."""
        words = q.split()
        if len(words) == 1 and words[0].isascii() and words[0].isdecimal():
            return RedirectResponse(f"/jobs/{int(words[0])}", 303)
        has_state = any(word.lstrip("-").lower().startswith("state:") for word in words)
        return RedirectResponse(with_query("/queue", q=" ".join([*words, *([] if has_state else ["state:any"])])), 303)

    @dashboard.router.get("/search/terms", operation_id="list_jobs")
    async def complete(caller: Caller, q: Text = "") -> Response:
        """Return the texts by which a search can go on, as options of a list."""
        slot = int(dashboard.engine.clock() // VALUES_LIFETIME_S)
        texts = complete_search(q, lambda kind: values_in_slot(kind, caller, slot))
        return HTMLResponse("".join(map(Markup('<option value="{}">').format, texts)))

    @lru_cache(maxsize=50)
    def values_in_slot(kind: str, caller: Identity, _: int) -> list[str]:
        """Return the values of a term: all of a closed set, else those of the unfinished jobs that the caller may see,
        as read once in a slot of time, since there may be many jobs."""
        if kind in KINDS_OF_JOBS and (read := KINDS[kind].texts) is not None:
            sees_all = caller.has_role(Role.OPERATOR)
            jobs = (job for job in queries.jobs() if not job.spec.internal and (sees_all or owns(caller, job)))
            return sorted({text for job in jobs for text in read(job)} - {""})
        if kind in ("cluster", "home"):
            return sorted(cluster.name for cluster in queries.grid.clusters())
        policies = queries.policies.names()
        closed: Mapping[str, Iterable[str]] = {"state": STATE_GROUPS, "priority": Priority, "policy": policies}
        return sorted(closed.get(kind, ()))


def complete_search(q: str, values_of: Callable[[str], list[str]]) -> list[str]:
    """Return texts that complete the last word of a search: by a term, or by a value that occurs now."""
    prefix, sign, term = re.findall(r"\A(.*\s|)(-?)(\S*)\Z", q, re.DOTALL)[0]
    kind, colon, values = term.partition(":")
    kind = kind.lower()
    ends = list[str]()
    if colon:
        chosen, comma, value = values.rpartition(",")
        matches = (text for text in values_of(kind) if value.lower() in text.lower())
        ends += [f"{kind}:{chosen}{comma}{format_term(kind, text).partition(':')[2]}" for text in matches]
    else:
        ends += [f"{name}:" for name, term in KINDS.items() if term.number is None and name.startswith(kind)]
        ends += [name for name in values_of("cluster") if kind and kind in name.lower()]
    return [f"{prefix}{sign}{end}" for end in ends[:MAX_COMPLETIONS]]
