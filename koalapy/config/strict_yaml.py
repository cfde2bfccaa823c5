"""Find the configuration file, and read YAML files.

A mapping with a duplicate key is rejected; PyYAML silently keeps the last of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from koalapy.model.errors import UsageError

MERGE = "tag:yaml.org,2002:merge"
MAX_KEY_LENGTH = 60


class DuplicateKey(ValueError):
    """A mapping has a duplicate key."""


class AliasFound(ValueError):
    """A text has an alias (``*NAME``) although aliases are not allowed."""


class _Loader(yaml.SafeLoader):
    """A safe loader that rejects a mapping with a duplicate key."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a mapping; raise ``DuplicateKey`` if it has a key twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                location = f"line {line}" if line == lines[name] else f"lines {lines[name]} and {line}"
                raise DuplicateKey(
                    f"the key {key.value[:MAX_KEY_LENGTH]!r} is given twice, in {location}: leave one out"
                )
            lines[name] = line
        return node


class _LoaderWithoutAliases(_Loader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node as PyYAML does, but raise ``AliasFound`` for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise AliasFound("it has an alias (*NAME)")
        return super().compose_node(parent, index)


@contextmanager
def _only_value_errors() -> Iterator[None]:
    """Raise ``ValueError`` for each of PyYAML's exceptions for malformed texts, numbers, dates and tags."""
    try:
        yield
    except RecursionError as error:
        raise ValueError("it has too many levels: use fewer") from error
    except (yaml.YAMLError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def load_yaml(text: str, *, aliases: bool = True) -> Any:
    """Return the value of a YAML or JSON text. ``aliases``: whether the text may have aliases.

    Raise ``ValueError`` for any other text: ``DuplicateKey``, ``AliasFound``, or one with PyYAML's message.
    """
    # Both loaders are safe: they construct plain values only.
    with _only_value_errors():
        return yaml.load(text, _Loader if aliases else _LoaderWithoutAliases)


def load_documents(text: str, *, aliases: bool = True) -> list[Any]:
    """Return the values of all documents of a YAML or JSON text. The errors are those of ``load_yaml``."""
    with _only_value_errors():
        return list(yaml.load_all(text, _Loader if aliases else _LoaderWithoutAliases))


MAX_SIZE = 16 * 1024 * 1024
"""Maximum bytes of a configuration file."""


def _content(path: Path) -> str:
    """Return the text of a file. Raise ``ValueError`` if it is too large or not UTF-8."""
    with path.open("rb") as file:
        content = file.read(MAX_SIZE + 1)
    if len(content) > MAX_SIZE:
        raise ValueError(f"it is larger than {MAX_SIZE} bytes")
    return content.decode("utf-8")


def read_file(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file, unchecked. Raise ``UsageError`` if the file cannot be read."""
    try:
        values = load_yaml(_content(path)) or {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", field="--config") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold fields and values, not a {type(values).__name__}", field="--config")
    for key in values:
        if not isinstance(key, str) or key.startswith("_"):  # such keys would be arguments of the settings class
            raise UsageError(f"{path}: {key!r} is not the name of a setting", field=str(key), hint="leave it out")
    return values


INSTALLED_CONFIGURATIONS = ("~/.config/koala/koala.yaml", "/etc/koala/koala.yaml")
"""Configuration files of the account, and of the site."""


def installed_configuration(places: Sequence[str] = INSTALLED_CONFIGURATIONS) -> Path | None:
    """Return the configuration file of this host's daemon and agents, None if there is none.

    The account's own file precedes the site's. Return an unreadable file as well, so that reading it reports the error.
    """
    for name in places:
        path = Path(name).expanduser()
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # reading it reports the error
        return path
    return None
