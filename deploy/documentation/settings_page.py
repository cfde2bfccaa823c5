"""The page with every setting: of ``config.settings.Settings``, whatever is in it, by its types and docstrings."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from koalapy.config.errors import DELIMITER, PREFIX
from koalapy.config.settings import Settings
from koalapy.model.corrections import describe_bounds

NUMBERS = {"float": "number", "int": "whole number", "str": "text", "bool": "true or false"}
UNITS = {1024**4: "TiB", 1024**3: "GiB", 1024**2: "MiB"}
SPANS = {86400: "days", 3600: "hours"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One of them; ``path`` as it stands in refusals: ``clusters.NAME.mpi.ports``."""

    path: str
    kind: str
    default: str
    meaning: str

    @property
    def variable(self) -> str:
        return PREFIX + self.path.replace("[N]", "").upper().replace(".", DELIMITER)


@dataclass(slots=True)
class Section:
    """Settings that belong together, and the paths under which they all may be given."""

    paths: list[str]
    meaning: str
    settings: list[Setting] = field(default_factory=list)


def page() -> str:
    """As Markdown; the part by hand stands before it."""
    return "".join(f"\n{text}" for section in sections() for text in _told(section))


def _told(section: Section) -> Iterator[str]:
    top = section.paths == [""]
    yield "## Daemon\n" if top else f"## {', '.join(f'`{path}`' for path in section.paths)}\n"
    if section.meaning and not top:
        yield f"{section.meaning}\n"
    yield "| setting | value | default | meaning |\n| --- | --- | --- | --- |"
    for one in section.settings:
        name = one.path.removeprefix(f"{section.paths[0]}.")
        cells = (f"`{name}`", one.kind, one.default, one.meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def sections() -> list[Section]:
    """The daemon's own settings first, then each part of them; one that may stand in several places comes once."""
    found: dict[Any, Section] = {}
    waiting: list[tuple[str, Any]] = [("", Settings)]
    while waiting:
        path, kind = waiting.pop(0)
        if kind in found:
            found[kind].paths.append(path)
            continue
        section = found[kind] = Section([path], _paragraph(inspect.cleandoc(kind.__doc__ or "")))
        for name, type_, default, meaning in _fields(kind):
            own = f"{path}.{name}".removeprefix(".")
            below = list(_parts(own, type_))
            waiting += below
            if not below:
                section.settings.append(Setting(own, _kind(type_), _default(default, meaning), meaning))
    return [section for section in found.values() if section.settings]


def _fields(kind: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, type, default and meaning of each field of a section."""
    told = _docstrings(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            type_ = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            yield name, type_, info.default, told.get(name, "")
        return
    for own in fields(kind):
        default = own.default if own.default_factory is MISSING else own.default_factory()
        yield own.name, own.type, default, told.get(own.name, "")


@cache
def _docstrings(kind: type) -> Mapping[str, str]:
    """The texts below a class's fields; what a class says itself goes before what it inherits."""
    told: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("koalapy."):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(ast.Constant(str() as text)):
                        told[statement.target.id] = _paragraph(inspect.cleandoc(text))
    return told


def _paragraph(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _parts(path: str, type_: Any) -> Iterator[tuple[str, Any]]:
    """The sections within a setting: itself, or those of which it is a list or a mapping."""
    origin, within = get_origin(type_), get_args(type_)
    if is_dataclass(type_):
        yield path, type_
    elif origin is Annotated or origin in (Union, UnionType):
        for one in within[:1] if origin is Annotated else within:
            yield from _parts(path, one)
    elif origin in (list, tuple, Sequence):
        yield from _parts(f"{path}[N]", within[0])
    elif origin in (dict, Mapping):
        yield from _parts(f"{path}.NAME", within[1])


def _kind(type_: Any) -> str:
    """A type in words, with its bounds."""
    origin, within = get_origin(type_), get_args(type_)
    if origin is Annotated:
        bounds = [words for each in within[1:] for words in _bounds(each)]
        return ", ".join([_kind(within[0]), *bounds])
    if origin in (Union, UnionType):
        return " or ".join(_kind(one) for one in within if one is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in within)
    if origin in (list, tuple, Sequence, frozenset):
        return f"list of: {_kind(within[0])}"
    if origin in (dict, Mapping):
        return f"by name: {_kind(within[1])}"
    if isinstance(type_, type) and issubclass(type_, Enum):
        return ", ".join(f"`{one.value}`" for one in type_)
    return NUMBERS.get(getattr(type_, "__name__", ""), "path")


def _bounds(constraint: Any) -> Iterator[str]:
    if isinstance(constraint, FieldInfo):
        for each in constraint.metadata:
            yield from _bounds(each)
    elif isinstance(constraint, annotated_types.BaseMetadata):
        yield from describe_bounds(constraint)


def _default(value: Any, meaning: str) -> str:
    if isinstance(value, Enum):
        value = value.value
    if value is MISSING:
        return "required"
    if value is None or value == "" or value == [] or value == {} or value == ():
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        if meaning.startswith("Bytes") or value >= 1024**2:
            for size, unit in UNITS.items():
                if value >= size and value % size == 0:
                    return f"{int(value)} ({value // size} {unit})"
        for span, unit in SPANS.items():
            if value >= 2 * span and value % span == 0:
                return f"{value:.0f} ({value / span:.0f} {unit})"
        return f"{value:g}" if value < 10**6 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"
