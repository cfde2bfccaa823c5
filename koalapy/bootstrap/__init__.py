"""The only place where concrete adapters are chosen and put together."""

from koalapy.bootstrap.agents import agent, check
from koalapy.bootstrap.daemon import Wire, serve
from koalapy.bootstrap.policies import policies

__all__ = ["Wire", "agent", "check", "policies", "serve"]
