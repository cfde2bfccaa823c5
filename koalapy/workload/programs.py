"""What the jobs of a workload run."""

from dataclasses import dataclass

SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class Program:
    """A program and, roughly, how many seconds it takes on one cluster with its own arguments."""

    words: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    estimate: float = 5.0
    launcher: str = "openmpi"

    def command(self, arguments: tuple[str, ...] | None = None) -> list[str]:
        return [*self.words, *(self.arguments if arguments is None else arguments)]


def _app(name: str, estimate: float, *arguments: str) -> Program:
    return Program(("python", "-m", f"koalapy.apps.{name}"), ("--no-where", *arguments), estimate)


PROGRAMS: dict[str, Program] = {
    "prime": _app("prime", 5.0),
    "poisson": _app("poisson", 5.0),
    "wave": _app("wave", 5.0),
    "allgather": _app("allgather", 5.0),
    SLEEP: Program((SLEEP,), launcher="processes"),
}
"""The applications of sonmez-2010 and the like, and one that only takes its time."""
