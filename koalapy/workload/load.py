"""The background load of a run: a keeper for each cluster, whose jobs are submitted beside the run itself."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

from koalapy.workload.background import Keeper, LocalJob
from koalapy.workload.daemon import Away, Daemon, Json, Refused

AT_ONCE = 4


class BackgroundLoad:
    """Follows the clusters, and asks for local users' jobs where too few nodes are busy."""

    def __init__(
        self,
        daemon: Daemon,
        target: float,
        *,
        seconds: float,
        nodes: int | None = None,
        seed: int = 1,
        tell: Callable[[str], None],
    ) -> None:
        self._daemon, self._target, self._seconds, self._nodes, self._seed = daemon, target, seconds, nodes, seed
        self._tell = tell
        self._keepers: dict[str, Keeper] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, "background")
        self._asked: list[tuple[str, LocalJob, Future[None]]] = []
        self._complained: set[str] = set()
        self._looked = 0.0

    def look(self, now: float, clusters: Iterable[Json]) -> None:
        """Take in what the clusters said, and ask for what is due until the next look."""
        self._collect()
        span, self._looked = max(0.0, now - self._looked), now
        for cluster in clusters:
            name = cluster["name"]
            if name not in self._keepers:
                draws = Random(f"{self._seed}/{name}")
                self._keepers[name] = Keeper(self._target, draws, seconds=self._seconds, nodes=self._nodes)
            keeper = self._keepers[name]
            keeper.look(now, cluster["total"] - cluster["down"], cluster["background"])
            if cluster["state"] == "unreachable":
                continue
            for job in keeper.due(min(span, self._seconds)):
                self._asked.append((name, job, self._pool.submit(self._daemon.load, name, job.nodes, job.seconds)))

    def end(self) -> None:
        """Have everything end that was asked for and has not."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._collect()
        for name in self._keepers:
            try:
                self._daemon.unload(name)
            except (Away, Refused) as error:
                self._tell(f"background load of {name} goes on by itself: {error}")

    def _collect(self) -> None:
        done = [one for one in self._asked if one[2].done()]
        self._asked = [one for one in self._asked if not one[2].done()]
        for name, job, future in done:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                self._complained.discard(name)
                continue
            if not isinstance(error, Away | Refused):
                raise error
            self._keepers[name].refused(job)
            if name not in self._complained:
                self._complained.add(name)
                self._tell(f"no background load on {name}: {error}")
