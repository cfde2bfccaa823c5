"""Tables of all pages: columns, sorting, pages by keyset, HTML and CSV.

A table's address holds its order, columns and position, so that a view can be shared. The next page begins after the
last shown row, also if rows before it have gone.
"""

import csv
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Query, Request
from markupsafe import Markup, escape

from koalapy.api import fields
from koalapy.dashboard.rendering import format_iso_time, render_time, with_query
from koalapy.model.errors import UsageError, reject
from koalapy.model.wording import escape_formula, suggest_names

R = TypeVar("R")
Value = str | float | tuple[float, ...] | None
"""A value to sort by. None is last in either direction."""
Ident = str | int

DEFAULT_ROWS = 50
MAX_ROWS = 200
"""Maximum number of rows that a browser updates without a noticeable delay."""
MAX_CSV_ROWS = 1000
MAX_COLUMNS = 40
MAX_POSITION_LENGTH = 2500


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a table."""

    name: str
    title: str
    value: Callable[[R], object] | None = None
    """Return the value, for pages and CSV; by default the attribute of the name."""
    style: str = ""
    """Classes of the cell: ``number``, ``said`` (a text of any length), ``nowrap``."""
    format: Callable[[Any], str] | None = None
    """Return a value as text or HTML; by default, numbers have thousands separators. Cells of None are empty."""
    href: Callable[[R], str] | None = None
    """Return the path to which the value links, unless that is 0."""
    html: Callable[[R, float], str] | None = None
    """Return the cell as HTML in place of the value, given the row and the time. It must escape all texts."""
    is_optional: bool = False
    """Whether the column is hidden until a user chooses it."""
    is_sortable: bool = True
    sort_key: Callable[[R], Value] | None = None
    """Return the value to sort by, if it is not that for CSV."""
    is_in_csv: bool = True

    @property
    def getter(self) -> Callable[[R], Any]:
        return attrgetter(self.name) if self.value is None else self.value


def time_column(name: str, title: str, attribute: str, **options: Any) -> Column[Any]:
    """Return a column with the time in an attribute of the rows, in seconds since the epoch or None."""
    get: Callable[[Any], float | None] = attrgetter(attribute)

    def html(row: Any, now: float) -> str:
        return "" if (timestamp := get(row)) is None else render_time(timestamp)

    return Column(name, title, lambda row: format_iso_time(get(row)), "nowrap", **({"html": html} | options))


@dataclass(frozen=True, slots=True)
class TableDefinition(Generic[R]):
    """The columns of a table and what its rows link to."""

    name: str
    """The noun for the number of rows, and the field of the view that holds them."""
    columns: Sequence[Column[R]]
    default_sort: str
    """A column, with ``-`` before it for the descending order."""
    ident: Callable[[R], str]
    """Return the id of the row's element."""
    href: Callable[[R], str] | None = None
    """Return the path of the page of a row."""
    selectable: Callable[[R], str] | None = None
    """Return the value of the row's checkbox; empty if it cannot be selected."""

    @property
    def by_name(self) -> Mapping[str, Column[R]]:
        return {column.name: column for column in self.columns}


@dataclass(frozen=True, slots=True)
class TableQuery:
    """The order, columns and position that an address requests."""

    sort: str = ""
    columns: tuple[str, ...] = ()
    after: str = ""
    limit: int = DEFAULT_ROWS


Sort = Annotated[
    fields.Text, Query(max_length=60, description="column to sort by, with - before it for the descending order")
]
Columns = Annotated[list[fields.Text], Query(max_length=MAX_COLUMNS, description="the columns to show")]
After = Annotated[
    fields.Text, Query(max_length=MAX_POSITION_LENGTH, description="position of the last row of the previous page")
]
Words = Annotated[fields.Text, Query(max_length=200, description="only rows with all of these words")]
Limit = Annotated[int, Query(ge=1, le=MAX_CSV_ROWS, description="maximum number of rows")]


async def _read_query(
    request: Request,
    sort: Sort = "",
    columns: Columns = [],  # noqa: B006
    after: After = "",
    limit: Limit = DEFAULT_ROWS,
) -> TableQuery:
    """Return the part of an address that concerns its table. A CSV file has more rows than a page."""
    is_csv = request.url.path.endswith(".csv")
    if not is_csv and limit > MAX_ROWS:
        reject("limit", limit, f"is {limit}, but a page has at most {MAX_ROWS} rows", "request fewer, or the CSV file")
    rows = MAX_CSV_ROWS if is_csv and "limit" not in request.query_params else limit
    return TableQuery(sort, tuple(dict.fromkeys(columns)), after, rows)


TableParameters = Annotated[TableQuery, Depends(_read_query)]


@dataclass(frozen=True, slots=True)
class TableView:
    """A table as shown: its columns, order, size and further pages. The rows are in the view itself."""

    name: str
    path: str
    query: Mapping[str, str]
    """The filter of the page, which all links of the table keep."""
    columns: Sequence[str]
    """The shown columns."""
    chosen: bool
    """Whether the address names the columns."""
    sort: str
    sortable: Sequence[str]
    shown: int
    total: int | None
    """Number of rows on all pages; None if unknown."""
    limit: int
    is_first: bool
    next: str
    """Path of the next page; empty on the last."""
    csv: str
    """Path of the rows from this page on as CSV."""


def sort_of(definition: TableDefinition[Any], query: TableQuery, sortable: Collection[str] | None = None) -> str:
    """Return the requested order, or the default. Raise ``UsageError`` for an unknown column."""
    names = _sortable_columns(definition, sortable)
    if query.sort.removeprefix("-") in names:
        return query.sort
    if query.sort:
        hint = suggest_names(query.sort.removeprefix("-"), names)
        raise UsageError(f"rows cannot be sorted by {query.sort}", field="sort", value=query.sort, hint=hint)
    return definition.default_sort


def _sortable_columns(definition: TableDefinition[Any], sortable: Collection[str] | None) -> list[str]:
    return [c.name for c in definition.columns if c.is_sortable and (sortable is None or c.name in sortable)]


def make_view(
    definition: TableDefinition[Any],
    query: TableQuery,
    path: str,
    page_filter: Mapping[str, str],
    *,
    shown: int,
    total: int | None = None,
    next_after: str = "",
    sort: str = "",
    sortable: Collection[str] | None = None,
) -> TableView:
    """Return the description of a page of a table. Raise ``UsageError`` for an unknown column.

    ``sortable``: the columns that it can be sorted by, if not all.
    """
    for name in query.columns:
        if name not in definition.by_name:
            hint = suggest_names(name, definition.by_name)
            raise UsageError(f"there is no column {name}", field="columns", value=name, hint=hint)
    columns = [c.name for c in definition.columns if (c.name in query.columns if query.columns else not c.is_optional)]
    chosen = {"columns": list(query.columns)} if query.columns else {}
    parameters = {**page_filter, "sort": query.sort, **chosen}
    limit = {"limit": query.limit} if query.limit != DEFAULT_ROWS and not path.endswith(".csv") else {}
    return TableView(
        name=definition.name,
        path=path,
        query=dict(page_filter),
        columns=columns,
        chosen=bool(query.columns),
        sort=sort or sort_of(definition, query, sortable),
        sortable=_sortable_columns(definition, sortable),
        shown=shown,
        total=total,
        limit=query.limit,
        is_first=not query.after,
        next=with_query(path, **parameters, **limit, after=next_after) if next_after else "",
        csv=with_query(f"{path}.csv", **parameters, after=query.after),
    )


def cut_page(keyed: Sequence[tuple[Value, Ident, R]], query: TableQuery, sort: str) -> tuple[list[R], str]:
    """Return one page of items, given with sort value and id, and the position after it; empty on the last page."""
    is_descending = sort.startswith("-")
    present = [entry for entry in keyed if entry[0] is not None]
    absent = [entry for entry in keyed if entry[0] is None]
    try:
        if query.after:
            value, last = parse_position(query.after)
            if value is not None:
                start = (value, last)
                present = [e for e in present if ((e[0], e[1]) < start if is_descending else (e[0], e[1]) > start)]
            else:
                present, absent = [], [e for e in absent if e[1] > last]
        present.sort(key=itemgetter(0, 1), reverse=is_descending)
        absent.sort(key=itemgetter(1))
    except TypeError as error:
        raise invalid_position(query.after) from error
    ordered = present + absent
    page = ordered[: query.limit]
    has_more = len(ordered) > query.limit
    return [item for _, _, item in page], write_position(page[-1][0], page[-1][1]) if has_more else ""


def show_rows(
    definition: TableDefinition[R], query: TableQuery, path: str, page_filter: Mapping[str, str], rows: Sequence[R]
) -> tuple[list[R], TableView]:
    """Return a page of rows that are all in memory, and its description. Texts are sorted in any case."""
    sort = sort_of(definition, query)
    column = definition.by_name[sort.removeprefix("-")]
    key = column.sort_key or column.getter
    keyed = [(_sort_value(key(row)), definition.ident(row), row) for row in rows]
    page, position = cut_page(keyed, query, sort)
    return page, make_view(definition, query, path, page_filter, shown=len(page), total=len(rows), next_after=position)


def _sort_value(value: object) -> Value:
    if isinstance(value, str):
        return value.casefold() or None
    return value if isinstance(value, int | float | tuple) else None


def write_position(value: Value, ident: Ident) -> str:
    """Return the position of a row as text for an address."""
    return json.dumps([value, ident], separators=(",", ":"), ensure_ascii=False)


def parse_position(text: str) -> tuple[Any, Any]:
    """Return the sort value and the id of a position. Raise ``UsageError`` if it is invalid."""
    try:
        value, ident = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid_position(text) from error
    if not isinstance(ident, Ident) or not isinstance(value, str | int | float | list | None):
        raise invalid_position(text)
    return tuple(value) if isinstance(value, list) else value, ident


def parse_number_position(text: str) -> int:
    """Return the number of the last row of the previous page; 0 on the first page."""
    if not text:
        return 0
    ident = parse_position(text)[1]
    if not isinstance(ident, int) or not 0 < ident <= fields.MAX_ID:
        raise invalid_position(text)
    return ident


def invalid_position(text: str) -> UsageError:
    """Return the error for a position of which the table has no row."""
    return UsageError("the position is not valid", field="after", value=text[:200], hint="open the first page again")


def link(href: str, text: str) -> str:
    """Return a link as HTML."""
    return f'<a href="{escape(href)}">{escape(text)}</a>'


def matches_text(query: str, texts: Sequence[str]) -> bool:
    """Return whether every word occurs in one of the texts, in any case."""
    lower = [text.casefold() for text in texts]
    return all(any(word in text for text in lower) for word in query.casefold().split())


def fill_table(
    definition: TableDefinition[R], view: TableView | None, rows: Sequence[R], now: float
) -> tuple[list[Column[R]], list[tuple[R, Markup]]]:
    """Return the columns of a table, and each row with its cells as HTML; without a view the usual columns.

    Columns that are empty are left out unless the address names them. Cells name their column, since narrow screens
    show each row as a card.
    """
    columns = [c for c in definition.columns if (c.name in view.columns if view else not c.is_optional)]
    contents = {column.name: _cell_contents(column, rows, now) for column in columns}
    if rows and not (view and view.chosen):
        columns = [column for column in columns if any(contents[column.name])]
    cells = []
    for column in columns:
        style = f'class="{column.style}" ' if column.style else ""
        start = f'<td {style}data-name="{escape(column.title)}">'
        cells.append([f"{start}{text}</td>" for text in contents[column.name]])
    return columns, [(row, Markup("".join(texts))) for row, *texts in zip(rows, *cells, strict=True)]


def _cell_contents(column: Column[R], rows: Sequence[R], now: float) -> list[str]:
    """Return the contents of a column's cells as HTML."""
    if (html := column.html) is not None:
        return [html(row, now) for row in rows]
    values = formatted = list(map(column.getter, rows))
    if (show := column.format) is not None:
        formatted = ["" if value is None else show(value) for value in values]
    texts = ["" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(escape(cell)) for cell in formatted]
    if (href := column.href) is None:
        return texts
    cells = zip(rows, values, texts, strict=True)
    return [link(href(row), Markup(text)) if value else text for row, value, text in cells]


def render_csv(definition: TableDefinition[R], view: TableView, rows: Sequence[R]) -> str:
    """Return the shown columns of rows as CSV with a header; texts that spreadsheets would run are quoted."""
    columns = [definition.by_name[name] for name in view.columns]
    values = [(column.name, column.getter) for column in columns if column.is_in_csv]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name for name, _ in values])
    writer.writerows([escape_formula(value(row)) for _, value in values] for row in rows)
    return text.getvalue()
