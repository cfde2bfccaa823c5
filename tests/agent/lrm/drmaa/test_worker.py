"""Changes of the worker to the real package, tested without a DRMAA library."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from koalapy.agent.lrm.drmaa.worker import load_drmaa
from tests.needs import DRMAA


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the package's errors module without importing the package, which would load a library."""
    spec = find_spec("drmaa")
    if spec is None:
        pytest.skip(DRMAA.reason)
    package = ModuleType("drmaa")
    package.__path__ = list(spec.submodule_search_locations or ())
    loaded_modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "drmaa"}
    for name in loaded_modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "drmaa", package)
    yield importlib.import_module("drmaa.errors")
    for name in [name for name in sys.modules if name.startswith("drmaa.")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "expected"), [(b"no such job", "no such job"), (b"f\xfcr \xc3\xbc\xff", "f\ufffdr ü\ufffd"), (b"", "")]
)
def test_error_text_of_any_bytes_is_decoded(errors: Any, text: bytes, expected: str) -> None:
    buffer = errors.error_buffer
    load_drmaa()
    buffer.value = text  # as the library does
    with pytest.raises(errors.InvalidJobException) as raised:
        errors.error_check(18)
    assert str(raised.value) == f"code 18: {expected}"


@pytest.mark.usefixtures("errors")
def test_invalid_usage_keeps_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = ModuleType("drmaa.session")
    session.adapt_rusage = lambda lines: dict(line.split("=", 1) for line in lines)
    monkeypatch.setitem(sys.modules, "drmaa.session", session)
    load_drmaa()
    assert session.adapt_rusage(["a"]) == {}
