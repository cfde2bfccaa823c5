"""Parse and evaluate searches for jobs: ``user:alice state:waiting cluster:north size>32``.

Every term must match. ``term:one,other`` matches any of several values, ``-term:x`` negates the term, and ``*`` matches
any characters. A bare word is a part of a name, user, program or cluster. Text between quotation marks is literal;
two quotation marks there stand for one. Without a ``state`` term, only unfinished jobs match.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache
from math import ceil, floor, nan
from typing import NoReturn

from koalapy.model.application import application_of
from koalapy.model.errors import UsageError
from koalapy.model.job import ACTIVE_STATES, FINAL_STATES, Job, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.job_state import JobSort as JobSort
from koalapy.model.request import FlexibleRequest
from koalapy.model.wording import format_list

MAX_LENGTH = 1000
"""Maximum characters of a search."""
MAX_WORDS = 40
MAX_NUMBER = 2**53

STATE_GROUPS: dict[str, frozenset[JobState]] = {
    **{str(state): frozenset({state}) for state in JobState},
    "waiting": frozenset({JobState.QUEUED}),
    "active": ACTIVE_STATES,
    "over": FINAL_STATES,
    "any": frozenset(JobState),
}
UNFINISHED = frozenset(JobState) - FINAL_STATES


Numbers = Callable[[Job, float], float]
Texts = Callable[[Job], Iterable[str]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of term. ``public``: whether every user may see its value for all jobs."""

    example: str
    public: bool
    texts: Texts | None = None
    number: Numbers | None = None
    unit: str = ""


def _clusters(job: Job) -> Iterable[str]:
    """Return the clusters of the last attempt; before the first attempt, the clusters that the request names."""
    if job.attempt is not None:
        return (component.cluster for component in job.attempt.gang)
    if isinstance(job.spec.request, FlexibleRequest):
        return ()
    return (component.cluster for component in job.spec.request.components if component.cluster)


def _all_text(job: Job) -> str:
    """Return the texts that a bare word searches, in lower case, one a line."""
    spec = job.spec
    return "\n".join((spec.name, spec.owner, application_of(spec), *_clusters(job))).lower()


def _end_days(job: Job) -> Iterable[str]:
    """Return the day on which a job ended, in UTC: ``2026-11-24``; nothing for an unfinished job."""
    return () if job.ended_at is None else (datetime.fromtimestamp(job.ended_at, UTC).date().isoformat(),)


def _seconds_since_end(job: Job, now: float) -> float:
    """Return the time since the end of a job; not a number, which is in no range, for an unfinished job."""
    return nan if job.ended_at is None else now - job.ended_at


KINDS: dict[str, _Kind] = {
    "id": _Kind("id:12,13", True, texts=lambda job: (str(job.id),), number=lambda job, _: job.id),
    "state": _Kind("state:waiting", True),
    "user": _Kind("user:alice", False, texts=lambda job: (job.spec.owner,)),
    "name": _Kind("name:wave*", False, texts=lambda job: (job.spec.name,)),
    "app": _Kind("app:poisson", False, texts=lambda job: (application_of(job.spec),)),
    "policy": _Kind("policy:worst-fit", False, texts=lambda job: (job.spec.policy,)),
    "cluster": _Kind("cluster:north", True, texts=_clusters),
    "home": _Kind("home:north", True, texts=lambda job: (job.spec.home_site,)),
    "priority": _Kind("priority:high", True, texts=lambda job: (str(job.spec.priority),)),
    "size": _Kind("size>32", True, number=lambda job, _: job.spec.request.total_size),
    "age": _Kind("age>1h", True, number=lambda job, now: now - job.submitted_at, unit="seconds"),
    "ended": _Kind("ended>2d", True, texts=_end_days, number=_seconds_since_end, unit="seconds"),
    "array": _Kind("array:7", False, texts=lambda job: () if job.array_job is None else (str(job.array_job),)),
    "any": _Kind("any:wave", False, texts=lambda job: _all_text(job).split("\n")),
    "restarts": _Kind("restarts>0", False, number=lambda job, _: job.restarts),
}
_CHOICES = {"priority": [str(priority) for priority in Priority], "state": sorted(STATE_GROUPS)}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ":": lambda value, operand: value == operand,
    "=": lambda value, operand: value == operand,
    "<": lambda value, operand: value < operand,
    "<=": lambda value, operand: value <= operand,
    ">": lambda value, operand: value > operand,
    ">=": lambda value, operand: value >= operand,
}
_LEAST: dict[str, Callable[[float], int]] = {":": ceil, "=": ceil, ">": lambda number: floor(number) + 1, ">=": ceil}
_MOST: dict[str, Callable[[float], int]] = {":": floor, "=": floor, "<": lambda number: ceil(number) - 1, "<=": floor}
LITERAL_STAR = _STAR = "\ue000"
"""Represents a literal ``*``. Users cannot enter it, since it is not printable."""
STORED_KINDS = frozenset({"user", "name", "app", "home", "priority", "cluster", "any"})
"""The kinds of terms that compare texts which the database can select."""
_QUOTED = re.compile(r'("(?:[^"]|"")*")')
_PLAIN = re.compile(r"[\w.@+-]+")
_WORD = re.compile(r"(-?)([A-Za-z_]+)(<=|>=|[:=<>])(.*)", re.DOTALL)
_DAY = re.compile(r"\d{4}-\d\d-\d\d|[\d*-]*\*[\d*-]*", re.ASCII)
_JOB_NUMBER = re.compile(r"[0-9]{1,18}")
_PART = re.compile(r"\*[^*]+\*")
_PIECE = re.compile(r'(?:"[^"]*"|[^\s"])+')


@dataclass(frozen=True, slots=True)
class SearchTerm:
    """One term of a search."""

    kind: str
    operator: str
    values: tuple[str, ...]
    opposite: bool
    holds: Callable[[Job, float], bool]
    """Returns whether a job matches; the second argument is the time in seconds since the epoch."""

    @property
    def is_public(self) -> bool:
        """Return whether every user may see for all jobs whether the term matches."""
        return KINDS[self.kind].public


@dataclass(frozen=True, slots=True)
class JobSearch:
    """A valid search; ``states``: the only states that can match."""

    text: str
    terms: tuple[SearchTerm, ...]
    states: frozenset[JobState]

    def matches(self, job: Job, now: float, *, include_private: bool = True) -> bool:
        """Return whether a job matches.

        Without ``include_private``, only public terms can match, as for jobs of other users.
        """
        if job.state not in self.states:
            return False
        for term in self.terms:  # noqa: SIM110 - a generator costs more than all the terms
            if not ((include_private or term.is_public) and term.holds(job, now)):
                return False
        return True

    def single_value(self, kind: str) -> str:
        """Return the only value that matching jobs can have for a kind of term; empty if the search allows several."""
        for term in self.terms:
            if term.kind == kind and len(term.values) == 1 and not term.opposite and "*" not in term.values[0]:
                return term.values[0].replace(_STAR, "*")
        return ""

    @property
    def stored_texts(self) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
        """Return the kind, the values and the negation of each term that the database can check (``JobFilter``)."""
        return tuple((term.kind, term.values, term.opposite) for term in self.terms if term.kind in STORED_KINDS)

    @property
    def finds_tasks(self) -> bool:
        """Return whether tasks of arrays can match; other searches find only the arrays."""
        return self.ids is not None or any(term.kind == "array" and not term.opposite for term in self.terms)

    @property
    def array(self) -> int | None:
        """Return the only array of which tasks can match; None if the search has no such term."""
        number = self.single_value("array")
        return int(number) if _JOB_NUMBER.fullmatch(number) else None

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Return the ids of the only jobs that can match; None if the search has no such term."""
        for term in self.terms:
            if (
                term.kind == "id"
                and term.operator in (":", "=")
                and not term.opposite
                and "*" not in "".join(term.values)
            ):
                return tuple(int(value) for value in term.values if _JOB_NUMBER.fullmatch(value))
        return None

    def minimum(self, kind: str) -> int:
        """Return the smallest integer that the search allows for a kind of term; 0 without a bound."""
        return max([0, *self._bounds(kind, _LEAST)])

    def maximum(self, kind: str) -> int | None:
        """Return the largest integer that the search allows for a kind of term; None without a bound."""
        return min(self._bounds(kind, _MOST), default=None)

    def end_range(self, now: float) -> tuple[float | None, float | None]:
        """Return the times from and before which matching jobs ended; None without a bound."""
        since, until = list[float](), list[float]()
        for term in self.terms:
            if term.kind != "ended" or term.opposite or len(term.values) != 1 or "*" in term.values[0]:
                continue
            if term.operator in (":", "="):
                day = datetime.combine(date.fromisoformat(term.values[0]), datetime.min.time(), UTC).timestamp()
                since.append(day)
                until.append(day + 86400.0)
            else:
                seconds = _parse_number(self.text, KINDS["ended"], term.values[0])
                (until if term.operator.startswith(">") else since).append(now - seconds)
        # A second more than a bound that may be included.
        return max(since, default=None), None if not until else min(until) + 1.0

    def _bounds(self, kind: str, by_operator: Mapping[str, Callable[[float], int]]) -> list[int]:
        """Return the bound that each term of a kind sets by its operator, if it sets one."""
        return [
            by_operator[term.operator](float(term.values[0]))
            for term in self.terms
            if term.kind == kind and len(term.values) == 1 and not term.opposite and term.operator in by_operator
        ]


def parse_search(text: str) -> JobSearch:
    """Parse a search. Raise ``UsageError``, which names the invalid term, for a text that is not a search."""
    if len(text) > MAX_LENGTH:
        _refuse(text, f"the filter has {len(text)} characters", f"give at most {MAX_LENGTH}")
    if not text.isprintable():
        _refuse(text, "there are characters in the filter that cannot be seen", "leave them out")
    if text.count('"') % 2:
        wrong = text[: text.rindex('"')].split(" ")[-1] + text[text.rindex('"') :]
        _refuse(wrong, f"{wrong} has a quotation mark too many", 'put the whole value between two: name:"my job"')
    pieces = _PIECE.findall(text)
    if len(pieces) > MAX_WORDS:
        _refuse(text, f"the filter has {len(pieces)} words", f"give at most {MAX_WORDS}")
    terms, states = [], []
    for piece in pieces:
        term = _parse_term(piece)
        if term.kind == "state":
            matching_states = frozenset[JobState]().union(*(STATE_GROUPS[value] for value in term.values))
            states.append(frozenset(JobState) - matching_states if term.opposite else matching_states)
        else:
            terms.append(term)
    default = FINAL_STATES if any(term.kind == "ended" and not term.opposite for term in terms) else UNFINISHED
    meant = frozenset(JobState).intersection(*states) if states else default
    return JobSearch(text.strip(), tuple(terms), meant)


def _parse_term(piece: str) -> SearchTerm:
    """Parse one word of a search, such as ``user:ann``. Raise ``UsageError`` if it is invalid."""
    if piece.isascii() and piece.isdecimal():
        piece = f"id:{piece}"
    match = _WORD.fullmatch(piece)
    if match is None:
        plain = piece.replace('"', "").lower()
        if _PLAIN.fullmatch(literal := plain.removeprefix("-")):
            return _build_test(piece, "any", ":", (f"*{literal}*",), opposite=plain != literal)
        _refuse(
            piece,
            f"{piece} is not a word of a filter",
            f"say of what: {_quote_if_needed('name:', plain)}, {_quote_if_needed('user:', plain)}",
        )
    sign, name, operator, text = match.groups()
    kind = name.lower()
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        guess = f"did you mean {near[0]}? " if near else ""
        _refuse(piece, f"there is no {name} in filters", f"{guess}known: {', '.join(KINDS)}")
    values = tuple(value.strip() for value in _split_values(text.lower() if kind == "any" else text))
    if not all(values):
        _refuse(piece, f"{piece} has no value", f"as in {KINDS[kind].example}")
    return _build_test(piece, kind, operator, values, sign == "-")


def format_term(kind: str, value: str) -> str:
    """Return a term that matches exactly this value, with quotation marks where needed."""
    text = value if _PLAIN.fullmatch(value) else '"' + value.replace('"', '""') + '"'
    return f"{kind}:{text}"


def _split_values(text: str) -> list[str]:
    """Split values at commas outside quotation marks, and remove the quotation marks."""
    values = [""]
    for index, piece in enumerate(_QUOTED.split(text)):
        first, *pieces = [piece[1:-1].replace('""', '"').replace("*", _STAR)] if index % 2 else piece.split(",")
        values[-1] += first
        values += pieces
    return values


def _quote_if_needed(prefix: str, text: str) -> str:
    return f'{prefix}"{text}"' if " " in text else f"{prefix}{text[:40] or 'TEXT'}"


def _build_test(piece: str, kind: str, operator: str, values: tuple[str, ...], opposite: bool) -> SearchTerm:
    """Return the term with its test of a job. Raise ``UsageError`` if operator or values do not suit the kind.

    ``piece`` is the word of the search, for messages. ``opposite``: the term matches all other jobs.
    """
    search_kind = KINDS[kind]
    if kind in _CHOICES:
        values = tuple(value.lower() for value in values)
        for value in values:
            if value not in _CHOICES[kind]:
                near = get_close_matches(value, _CHOICES[kind], 1)
                guess = f"did you mean {near[0]}? " if near else ""
                _refuse(piece, f"there is no {kind} {value}", f"{guess}known: {', '.join(_CHOICES[kind])}")
    exact = operator in (":", "=")
    if kind == "ended" and exact and not all(map(_is_day, values)):
        _refuse(piece, f"{','.join(values)} in {piece} is not a day", "as in ended:2026-11-24 or ended>2d")
    if not exact and search_kind.number is None:
        _refuse(piece, f"{kind} cannot be compared with {operator}", f"as in {search_kind.example}")
    if not exact and len(values) > 1:
        _refuse(piece, f"{kind} is compared with {format_list(values)}", f"compare it with one: {search_kind.example}")
    holds = (
        _number_test(piece, search_kind, operator, values)
        if search_kind.number and (not exact or not search_kind.texts)
        else _text_test(search_kind, values)
    )
    if opposite:
        plain = holds
        holds = lambda job, now: not plain(job, now)  # noqa: E731
    return SearchTerm(kind, operator, values, opposite, holds)


def _is_day(value: str) -> bool:
    """Return whether a text is a day, or has ``*`` for a part of one."""
    try:
        return _DAY.fullmatch(value) is not None and ("*" in value or bool(date.fromisoformat(value)))
    except ValueError:
        return False


def _text_test(search_kind: _Kind, values: tuple[str, ...]) -> Callable[[Job, float], bool]:
    """Return a test of a job's texts: one must equal a value, in which ``*`` matches anything."""
    texts = search_kind.texts
    if texts is None:
        return lambda job, now: True  # ``JobSearch.states`` holds the states
    parts = [value[1:-1].replace(_STAR, "*") for value in values if _PART.fullmatch(value)]
    if texts is KINDS["any"].texts and len(parts) == len(values):  # as a bare word; no value has a line break
        first, *remaining = parts
        return lambda job, now: first in (text := _all_text(job)) or any(part in text for part in remaining)
    exact = frozenset(value.replace(_STAR, "*") for value in values if "*" not in value)
    patterns = [_pattern(value) for value in values if "*" in value]
    if not patterns:
        return lambda job, now: any(text in exact for text in texts(job))
    return lambda job, now: any(text in exact or any(p.fullmatch(text) for p in patterns) for text in texts(job))


@lru_cache(100)
def _pattern(value: str) -> re.Pattern[str]:
    """Return the pattern of a value, in which only ``*`` has a special meaning."""
    pattern = translate(re.sub(r"[\[?]", lambda match: f"[{match[0]}]", value))
    return re.compile(pattern.replace(_STAR, r"\*"))


def _number_test(
    piece: str, search_kind: _Kind, operator: str, values: tuple[str, ...]
) -> Callable[[Job, float], bool]:
    """Return a test whether a number of a job compares to one of the values; ``piece`` is for messages."""
    number, compare = search_kind.number, _OPERATORS[operator]
    assert number is not None
    numbers = [_parse_number(piece, search_kind, value) for value in values]
    return lambda job, now: any(compare(number(job, now), value) for value in numbers)


def _parse_number(piece: str, search_kind: _Kind, value: str) -> float:
    """Return a number, in seconds if it has a unit of time. Raise ``UsageError`` if it is invalid."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([smhdw]?)", value, re.ASCII)
    if match is None or (match[2] and not search_kind.unit) or float(match[1]) > MAX_NUMBER:
        expected = "seconds, or 90m, 2h, 1d" if search_kind.unit else "a number"
        _refuse(piece, f"{value} in {piece} is not a number", f"give {expected}: {search_kind.example}")
    return float(match[1]) * _UNITS[match[2]]


def _refuse(value: str, problem: str, way_out: str) -> NoReturn:
    """Raise ``UsageError`` for a part of a search; ``way_out`` is the hint."""
    problem, value = problem.replace(_STAR, "*"), value.replace(_STAR, "*")
    raise UsageError(problem[:300], field="q", value=value[:100], hint=way_out[:500])
