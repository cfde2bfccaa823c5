"""Build the reference of settings from the types and docstrings of ``config.settings.Settings``."""

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
from koalapy.model.errors import describe_bounds

NUMBERS = {"float": "number", "int": "whole number", "str": "text", "bool": "true or false"}
UNITS = {1024**4: "TiB", 1024**3: "GiB", 1024**2: "MiB"}
SPANS = {86400: "days", 3600: "hours"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting; ``path`` is its name in errors, such as ``clusters.NAME.mpi.ports``."""

    path: str
    kind: str
    default: str
    meaning: str

    @property
    def variable(self) -> str:
        return PREFIX + self.path.replace("[N]", "").upper().replace(".", DELIMITER)


@dataclass(slots=True)
class Section:
    """Settings of one class, and the paths at which they may be set."""

    paths: list[str]
    meaning: str
    settings: list[Setting] = field(default_factory=list)


def page() -> str:
    """Return a table for each section as Markdown."""
    return "".join(f"\n{text}" for section in sections() for text in _render_section(section))


def _render_section(section: Section) -> Iterator[str]:
    top = section.paths == [""]
    yield "## Daemon\n" if top else f"## {', '.join(f'`{path}`' for path in section.paths)}\n"
    if section.meaning and not top:
        yield f"{section.meaning}\n"
    yield "| setting | value | default | meaning |\n| --- | --- | --- | --- |"
    for setting in section.settings:
        name = setting.path.removeprefix(f"{section.paths[0]}.")
        cells = (f"`{name}`", setting.kind, setting.default, setting.meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def sections() -> list[Section]:
    """Return the sections, the daemon's own settings first. A section with several paths occurs once."""
    sections_by_type: dict[Any, Section] = {}
    waiting: list[tuple[str, Any]] = [("", Settings)]
    while waiting:
        path, kind = waiting.pop(0)
        if kind in sections_by_type:
            sections_by_type[kind].paths.append(path)
            continue
        section = sections_by_type[kind] = Section([path], _paragraph(inspect.cleandoc(kind.__doc__ or "")))
        for name, type_, default, meaning in _fields(kind):
            setting_path = f"{path}.{name}".removeprefix(".")
            below = list(_parts(setting_path, type_))
            waiting += below
            if not below:
                section.settings.append(Setting(setting_path, _kind(type_), _default(default, meaning), meaning))
    return [section for section in sections_by_type.values() if section.settings]


def _fields(kind: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, type, default and meaning of each field of a section."""
    docstrings = _docstrings(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            type_ = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            yield name, type_, info.default, docstrings.get(name, "")
        return
    for dataclass_field in fields(kind):
        default = (
            dataclass_field.default if dataclass_field.default_factory is MISSING else dataclass_field.default_factory()
        )
        yield dataclass_field.name, dataclass_field.type, default, docstrings.get(dataclass_field.name, "")


@cache
def _docstrings(kind: type) -> Mapping[str, str]:
    """Return the docstrings of a class's fields, including inherited ones."""
    docstrings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("koalapy."):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(ast.Constant(str() as text)):
                        docstrings[statement.target.id] = _paragraph(inspect.cleandoc(text))
    return docstrings


def _paragraph(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _parts(path: str, type_: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sections within a setting: itself, or the elements of a list or mapping."""
    origin, within = get_origin(type_), get_args(type_)
    if is_dataclass(type_):
        yield path, type_
    elif origin is Annotated or origin in (Union, UnionType):
        for part_type in within[:1] if origin is Annotated else within:
            yield from _parts(path, part_type)
    elif origin in (list, tuple, Sequence):
        yield from _parts(f"{path}[N]", within[0])
    elif origin in (dict, Mapping):
        yield from _parts(f"{path}.NAME", within[1])


def _kind(type_: Any) -> str:
    """Describe a type with its bounds."""
    origin, within = get_origin(type_), get_args(type_)
    if origin is Annotated:
        bounds = [phrase for constraint in within[1:] for phrase in _bounds(constraint)]
        return ", ".join([_kind(within[0]), *bounds])
    if origin in (Union, UnionType):
        return " or ".join(_kind(member) for member in within if member is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in within)
    if origin in (list, tuple, Sequence, frozenset):
        return f"list of: {_kind(within[0])}"
    if origin in (dict, Mapping):
        return f"by name: {_kind(within[1])}"
    if isinstance(type_, type) and issubclass(type_, Enum):
        return ", ".join(f"`{member.value}`" for member in type_)
    return NUMBERS.get(getattr(type_, "__name__", ""), "path")


def _bounds(constraint: Any) -> Iterator[str]:
    if isinstance(constraint, FieldInfo):
        for inner_constraint in constraint.metadata:
            yield from _bounds(inner_constraint)
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
