"""JSON encoding of questions to simulations and of their answers, for the child process that computes them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from koalapy.model.request import ClusterName
from koalapy.policies.registry import Registry
from koalapy.simulation import twin
from koalapy.simulation.moment import Moment, NodesNow
from koalapy.simulation.record.format import beginning_from_json, beginning_to_json, job_from_json, job_to_json
from koalapy.simulation.twin import Answer, Change, Question, Report

Json = Any


@dataclass(frozen=True)
class _ForecastTerms:
    """A forecast question without its snapshot of the scheduler."""

    nodes: Mapping[ClusterName, NodesNow]
    change: Change
    horizon: float
    max_draws: int


def write_question(question: Question) -> Iterator[Json]:
    """Yield the question without its jobs and policies, then each job."""
    moment, beginning = question.moment, question.moment.beginning
    yield _to_json(_ForecastTerms, _ForecastTerms(moment.nodes, question.change, question.horizon, question.max_draws))
    yield beginning_to_json(replace(beginning, jobs=()))
    yield from map(job_to_json, beginning.jobs)


def answer_question(policies: Callable[[], Registry], values: Iterator[Json], *, report: Report) -> Json:
    """Return the answer to a question that ``write_question`` encoded."""
    terms: _ForecastTerms = _from_json(_ForecastTerms, next(values))
    beginning = beginning_from_json(next(values))
    moment = Moment(replace(beginning, jobs=tuple(map(job_from_json, values))), terms.nodes)
    return _to_json(
        Answer, twin.answer_what_if(Question(moment, terms.change, policies, terms.horizon, terms.max_draws, report))
    )


def read_answer(value: Json) -> Answer:
    answer: Answer = _from_json(Answer, value)
    return answer


def _to_json(kind: Any, value: Any) -> Json:
    return _type_adapter(kind).dump_python(value, mode="json")


def _from_json(kind: Any, value: Json) -> Any:
    return _type_adapter(kind).validate_python(value)


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
