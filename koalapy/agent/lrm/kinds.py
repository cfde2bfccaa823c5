"""The kinds of local resource managers: what each can do, and its adapter. Nobody else asks for a kind by its name."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from koalapy.agent.lrm.port import Lrm

if TYPE_CHECKING:
    from koalapy.agent.core.settings import AgentSettings


@dataclass(frozen=True, slots=True)
class LrmKind:
    """One kind; ``module`` has a function ``make`` that gives its adapter, and is imported by who needs it only."""

    module: str
    on_this_host: bool = False
    """Its nodes are processes of this host: no shared file system, loopback addresses, an agent started by the daemon,
    the account's own home and Python, and starts that fail on purpose."""
    sees_local_users: bool = True
    """Whether it tells of the jobs that others have there."""

    @property
    def make(self) -> "Callable[[AgentSettings], Lrm]":
        """The adapter by an agent's settings; raises ``SiteRejected`` when a package that it needs is missing."""
        made: Callable[[AgentSettings], Lrm] = import_module(f"koalapy.agent.lrm.{self.module}").make
        return made


KINDS = {
    "local": LrmKind("local.adapter", on_this_host=True),
    "slurm": LrmKind("slurm.adapter"),
    "sge": LrmKind("sge.adapter"),
    "drmaa": LrmKind("drmaa.adapter", sees_local_users=False),
}
