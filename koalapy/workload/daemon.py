"""What a run asks of a daemon."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Json = dict[str, Any]


class Away(Exception):
    """The daemon does not answer, or cannot just now; it may later."""


class Busy(Away):
    """The daemon has too much to do for the time being."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """The daemon will not do that."""


class Daemon(Protocol):
    """Each may raise ``Away`` or ``Refused``."""

    def submit(self, job: Json, key: str) -> Json:
        """Submit once, however often it is sent with this key; also ``Busy``."""
        ...

    def clusters(self) -> Sequence[Json]: ...

    def active(self) -> Mapping[int, str]:
        """State of each job that is not over, at least of those submitted here."""
        ...

    def job(self, job: int) -> Json: ...

    def attempts(self, job: int) -> Sequence[Json]: ...

    def cancel(self, jobs: Sequence[int]) -> Sequence[str]:
        """All of them; what stands against one keeps no other from it, and is answered."""
        ...

    def load(self, cluster: str, nodes: int, seconds: float) -> None:
        """Keep nodes of a cluster busy past the scheduler."""

    def unload(self, cluster: str) -> None:
        """End what ``load`` began there."""
