"""The only place where concrete adapters are chosen and put together."""

from koalapy.bootstrap.agents import agent, check
from koalapy.bootstrap.daemon import policies, serve

__all__ = ["agent", "check", "policies", "serve"]
