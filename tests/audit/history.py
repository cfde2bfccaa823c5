"""Generate correct histories of a grid as facts, each source with its own clock."""

from dataclasses import dataclass, replace
from random import Random

from koalapy.audit.facts import ArrayCounts, Fact, JobRecord, Output, Run, RunKind, Source, Submission

NODES = {"north": 4, "south": 3}
NOW = 100_000.0
DATABASE = Source("database", read_at=NOW)
CLAIMS = replace(DATABASE, lateness_s=30.0)
RECORD = Source("record of events", lateness_s=5.0)
OUTPUT = Source("stored output")
MAX_REPORT_DELAY_S = 4.0


@dataclass
class Manager:
    """A resource manager with its own clock, which is wrong by at most 2 s."""

    cluster: str
    error_s: float

    @property
    def source(self) -> Source:
        return Source(
            f"sacct of {self.cluster}", f"cluster {self.cluster}", resolution_s=1.0, offset_s=2.0, read_at=NOW
        )

    @property
    def journals(self) -> Source:
        return Source(f"journals of {self.cluster}", f"cluster {self.cluster}", read_at=NOW)

    def stamp(self, at: float) -> float:
        return float(int(at + self.error_s))


class History:
    """Jobs, arrays and dependencies that ran one after another or at once, some after failed attempts."""

    def __init__(self, seed: int, jobs: int = 6) -> None:
        self._random = Random(seed)
        self.facts: list[Fact] = []
        self.managers = {name: Manager(name, self._random.uniform(-1.9, 1.9)) for name in NODES}
        self._free_at = {(name, index): 100.0 for name, count in NODES.items() for index in range(1, count + 1)}
        self._ends: dict[int, tuple[str, float]] = {}
        self._next_job = 2
        # It shows that no job that ended later was removed.
        self.facts.append(JobRecord(DATABASE, 1, "cancelled", submitted_at=10.0, ended_at=50.0))
        for _ in range(jobs):
            kind = self._random.choice(("job", "job", "job", "array", "cancelled"))
            if kind == "array":
                self._add_array()
            else:
                self._add_job(runs=kind == "job")

    def _take_id(self) -> int:
        self._next_job += 1
        return self._next_job - 1

    def _add_array(self) -> None:
        array, size, step = self._take_id(), self._random.randint(1, 4), self._random.randint(1, 3)
        states = []
        for position in range(size):
            states.append(self._add_job(task_of=array, index=5 + position * step))
        succeeded = states.count("succeeded")
        counts = ArrayCounts(size, ((5, 5 + (size - 1) * step, step),), succeeded, size - succeeded)
        state = "succeeded" if succeeded == size else "failed"
        end = max(self._ends[job][1] for job in range(array + 1, array + 1 + size))
        self.facts.append(
            JobRecord(DATABASE, array, state, 0, 0 if state == "succeeded" else 1, "", 100.0, end, array=counts)
        )
        self.facts.append(Submission(DATABASE, f"key {array}", array))
        self._ends[array] = state, end

    def _add_job(self, *, runs: bool = True, task_of: int | None = None, index: int | None = None) -> str:
        random, job = self._random, self._take_id()
        after: list[tuple[tuple[int, str], ...]] = []
        begin = random.uniform(100.0, 500.0)
        if self._ends and random.random() < 0.4 and task_of is None:
            other = random.choice(list(self._ends))
            state, end = self._ends[other]
            after.append(((other, random.choice(("any", "ok" if state == "succeeded" else "failed"))),))
            begin = max(begin, end)
        attempts = random.randint(1, 3) if runs else 0
        for attempt in range(1, attempts + 1):
            code = (0 if random.random() < 0.7 else 3) if attempt == attempts else None
            begin = self._add_attempt(job, attempt, begin, code)
        state, exit_code = ("cancelled", None) if not runs else ("succeeded", 0) if code == 0 else ("failed", code)
        self._ends[job] = state, begin
        record = JobRecord(DATABASE, job, state, attempts, exit_code, "", 100.0, begin, after=tuple(after))
        self.facts.append(replace(record, task_of=task_of, index=index))
        if task_of is None:
            self.facts.append(Submission(DATABASE, f"key {job}", job))
        return state

    def _add_attempt(self, job: int, attempt: int, begin: float, code: int | None) -> float:
        """Add a gang that holds its nodes at the same time, and return when the daemon knew of its end."""
        random = self._random
        gang = random.sample(list(NODES), random.randint(1, 2))
        nodes = {c: random.sample(range(1, NODES[c] + 1), random.randint(1, NODES[c])) for c in gang}
        begin = max(begin, *(self._free_at[c, index] for c in gang for index in nodes[c]))
        end = begin + random.uniform(10.0, 200.0)
        known_at = end + random.uniform(0.0, MAX_REPORT_DELAY_S)
        for part, cluster in enumerate(gang):
            manager = self.managers[cluster]
            names = tuple(f"{cluster}-{index}" for index in nodes[cluster])
            for index in nodes[cluster]:
                # The next job may get a node before the daemon knows that it was free.
                self._free_at[cluster, index] = end
            run = Run(CLAIMS, RunKind.CLAIM, job, attempt, str(part), cluster, begin, known_at, True, names, len(names))
            run = replace(run, nonce="5eed", run_id=f"{job}{attempt}{part}")
            held = replace(run, source=manager.source, kind=RunKind.HELD)
            held = replace(held, begin=manager.stamp(begin), end=manager.stamp(end))
            program = replace(run, source=RECORD, kind=RunKind.PROGRAM, begin=begin + 1.0, exit_code=code)
            self.facts += [run, held]
            if code is not None or random.random() < 0.5:
                size = random.randint(0, 1000)
                self.facts += [
                    program,
                    Output(manager.journals, job, attempt, str(part), written=size),
                    Output(OUTPUT, job, attempt, str(part), stored=size),
                ]
        return known_at
