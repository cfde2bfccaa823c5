"""The fixtures of the API's tests."""

from tests.api.conftest import open_api

__all__ = ["open_api"]
