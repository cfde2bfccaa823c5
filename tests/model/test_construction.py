"""Constructors and copies of frozen dataclasses that are faster than those of ``dataclass``."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from koalapy.model.construction import fast_constructor, make_copier
from koalapy.model.job import Attempt, Component, ComponentState, JobState, TimelineEntry
from koalapy.model.reports import ClusterReport, ComponentStatus


@dataclass(frozen=True, slots=True)
class Slow:
    first: int
    second: str = "b"
    kind: str = field(default="slow", kw_only=True)
    last: tuple[int, ...] = ()


@fast_constructor
@dataclass(frozen=True, slots=True)
class Fast:
    first: int
    second: str = "b"
    kind: str = field(default="slow", kw_only=True)
    last: tuple[int, ...] = ()


def values_of(value: object) -> list[object]:
    return [getattr(value, each.name) for each in fields(value)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positional", "named"), [((1,), {}), ((1, "c", (2,)), {}), ((), {"first": 1, "last": (3,), "kind": "other"})]
)
def test_fast_constructor_sets_the_same_fields(positional: tuple[object, ...], named: dict[str, object]) -> None:
    fast, slow = Fast(*positional, **named), Slow(*positional, **named)  # type: ignore[arg-type]
    assert type(fast) is Fast
    assert values_of(fast) == values_of(slow)
    assert inspect.signature(Fast) == inspect.signature(Slow)


@pytest.mark.parametrize(("positional", "named"), [((), {}), ((1, "c", (2,), "kind"), {}), ((1,), {"other": 2})])
def test_fast_constructor_with_wrong_arguments_raises(positional: tuple[object, ...], named: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="__init__"):
        Fast(*positional, **named)  # type: ignore[arg-type]


def test_object_of_fast_constructor_is_frozen_equal_and_copyable() -> None:
    made = Fast(1, "c")
    with pytest.raises(FrozenInstanceError):
        made.first = 2  # type: ignore[misc]
    assert made == Fast(1, "c") != replace(made, first=2) == Fast(2, "c")
    assert hash(made) == hash(Fast(1, "c"))
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


def test_copier_returns_another_object_with_equal_fields() -> None:
    for value in (
        Component(3, "north", 2, ComponentState.RUNNING, hosts=("a", "b"), lease=3.0),
        Attempt(2, (Component(0, "north", 1),), 5.0, nonce="ab"),
    ):
        copied = make_copier(type(value))(value)
        assert copied == value
        assert copied is not value
        assert type(copied) is type(value)
        with pytest.raises(FrozenInstanceError):
            setattr(copied, fields(copied)[0].name, 1)


@pytest.mark.parametrize(
    "value",
    [
        TimelineEntry(1, 2.0, "queued", JobState.QUEUED),
        ComponentStatus("7.1.0", ComponentState.ENDED),
        ClusterReport(1, 1),
    ],
)
def test_classes_of_the_scheduler_have_the_fast_constructor(value: object) -> None:
    assert "_unfrozen" in type(value).__init__.__globals__  # type: ignore[misc]


def test_fast_constructor_rejects_class_whose_constructor_does_more() -> None:
    @dataclass(frozen=True, slots=True)
    class WithFactory:
        texts: list[str] = field(default_factory=list)

    @dataclass(frozen=True, slots=True)
    class WithCheck:
        text: str

        def __post_init__(self) -> None:
            raise ValueError

    @dataclass(frozen=True, slots=True)
    class Derived(Slow):
        more: int = 0

    for kind in (WithFactory, WithCheck, Derived):
        with pytest.raises(TypeError, match=rf"{kind.__name__} needs the constructor of dataclass"):
            fast_constructor(kind)
