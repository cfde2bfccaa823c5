"""A job as a file has it, or as it comes from standard input."""

import json
import sys
from pathlib import Path

from koalapy.client.client import Json
from koalapy.client.errors import CliError, Exit

STANDARD_INPUT = "-"
"""As a file's name."""
MAX_SIZE = 1024 * 1024
"""Bytes: as many as the daemon takes of a request."""


def read(file: Path) -> Json:
    """The fields of a job; ``CliError`` for a file that is of no use."""
    name = "standard input" if str(file) == STANDARD_INPUT else str(file)
    body = _parsed(name, _content(name, file))
    if not isinstance(body, dict):
        raise CliError(f"{name} holds no job", Exit.USAGE, "give fields and values as in docs/cli.md")
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as error:
        hint = "write it as a text, in quotes"
        raise CliError(f"{name} has what JSON cannot say: {error}", Exit.USAGE, hint) from error
    return body


def _content(name: str, file: Path) -> bytes:
    try:
        if str(file) == STANDARD_INPUT:
            content = sys.stdin.buffer.read(MAX_SIZE + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MAX_SIZE + 1)
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror}", Exit.USAGE, "give a file with -f") from error
    if len(content) > MAX_SIZE:
        hint = "put large data into files that the job reads"
        raise CliError(f"{name} is larger than {MAX_SIZE} bytes", Exit.USAGE, hint)
    return content


def _parsed(name: str, content: bytes) -> object:
    import yaml

    from koalapy.config.strict_yaml import AliasFound, DuplicateKey, load_yaml

    try:
        # Without aliases: what is small to read may be endless to write.
        return load_yaml(content.decode("utf-8"), aliases=False)
    except AliasFound as error:
        hint = "write out what it stands for, or put it in quotes"
        raise CliError(f"{name} has an alias (*NAME)", Exit.USAGE, hint) from error
    except DuplicateKey as error:
        raise CliError(f"cannot read {name}: {error}", Exit.USAGE) from error
    except RecursionError as error:
        raise CliError(f"cannot read {name}: too much within each other", Exit.USAGE, "write it flatter") from error
    except (
        ValueError,
        LookupError,
        AttributeError,
        yaml.YAMLError,
    ) as error:  # the reader's own of odd numbers and tags
        raise CliError(f"cannot read {name}: {error}", Exit.USAGE, "write it in YAML or JSON") from error
