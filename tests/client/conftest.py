"""The fixtures of the API's tests and of the command line's."""

from tests.api.conftest import open_api
from tests.cli.conftest import server

__all__ = ["open_api", "server"]
