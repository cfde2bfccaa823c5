"""Hypothesis strategies of valid submissions, derived from the fields of the model."""

from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from koalapy.model.array import TaskIndices
from koalapy.model.field import Bounds, describe_fields, split_annotation
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_requirement import MAX_GPUS, Gpus

short_texts = st.text(max_size=8)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of the values of an annotated type within its bounds."""
    base, marks = split_annotation(kind)
    bounds = next((mark for mark in marks if isinstance(mark, Bounds)), Bounds(minimum=0, maximum=2**50))
    if get_origin(base) in (Union, UnionType):
        return st.one_of([values_of(member) for member in get_args(base)])
    if get_origin(base) is Literal:
        return st.sampled_from(get_args(base))
    if get_origin(base) is tuple:
        first, last = get_args(base)[0], get_args(base)[-1]
        return (
            st.lists(values_of(first), max_size=3).map(tuple)
            if last is Ellipsis
            else st.tuples(values_of(first), short_texts)
        )
    if base is int:
        minimum, maximum = int(bounds.minimum or 0), None if bounds.maximum is None else int(bounds.maximum)
        return st.integers(minimum, 100 if maximum is None else maximum)
    if base is float:
        return st.floats(bounds.above or bounds.minimum or 0, bounds.maximum, exclude_min=bounds.above is not None)
    if base is TaskIndices:
        return st.sampled_from(["1-3", "0-8:4%2", "2,5-7"]).map(TaskIndices.parse)
    if base is Gpus:
        return st.builds(Gpus, st.integers(1, MAX_GPUS), st.sampled_from(["", "a100"]))
    if is_dataclass(base):
        return instances_of(base)  # type: ignore[arg-type]
    if issubclass(base, Enum):
        return st.sampled_from(base)
    return {str: short_texts, bool: st.booleans()}[base]


def instances_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy of the instances of a dataclass of the model."""
    parts = {
        name: values_of(description.type) | st.none() if description.is_optional else values_of(description.type)
        for name, description in describe_fields(kind).items()
    }
    return st.builds(kind, **parts)


specs: st.SearchStrategy[JobSpec] = instances_of(JobSpec)
