"""Does to the grid what was planned, and writes down what it did."""

import heapq
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.chaos import victims
from tests.chaos.faults import Fault, Whom
from tests.chaos.grid import Chaos
from tests.chaos.marks import Mark, MarkReader
from tests.chaos.victims import Victim
from tests.store.postgresql import Server

MOMENT_WITHIN = 3.0
"""Seconds that a planted moment is waited for; then it is done at any moment."""
LOOK = 0.03
INSTEAD: dict[Whom, Whom] = {"mpi": "runner", "runner": "agent"}
"""Who is taken where there is none of those."""


class Keeper(threading.Thread):
    """Starts the daemon again whenever it was killed; that it ends by itself is trouble."""

    def __init__(self, grid: Chaos, troubles: list[str]) -> None:
        super().__init__(name="keeper", daemon=True)
        self._grid, self._troubles = grid, troubles
        self.pause = 0.0
        self.starting = threading.Lock()
        """Held while it starts, and by whoever takes the database away from it."""
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            daemon = self._grid.daemon
            assert daemon is not None
            code = daemon.poll()
            if code is None:
                continue
            if code != -signal.SIGKILL:
                self._troubles.append(f"the daemon ended by itself, with {code}: see {self._grid.log}")
            self._over.wait(self.pause)
            with self.starting, suppress(RuntimeError):  # it says why in its log, and is looked at again
                self._grid.begin()

    def close(self) -> None:
        self._over.set()
        self.join()


class Waker(threading.Thread):
    """Lets what was stopped go on when its time has come."""

    def __init__(self) -> None:
        super().__init__(name="waker", daemon=True)
        self._stopped: list[tuple[float, int, Victim]] = []
        self._changed = threading.Condition()
        self._over = False

    def add(self, victim: Victim, seconds: float) -> None:
        with self._changed:
            heapq.heappush(self._stopped, (time.monotonic() + seconds, victim.handle, victim))
            self._changed.notify()

    def run(self) -> None:
        with self._changed:
            while self._stopped or not self._over:
                due = self._stopped[0][0] - time.monotonic() if self._stopped else 60.0
                if due > 0 and not (self._over and self._stopped):
                    self._changed.wait(due)
                    continue
                _, _, victim = heapq.heappop(self._stopped)
                victim.signal(signal.SIGCONT)
                victim.close()

    def close(self) -> None:
        """All go on at once."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self.join()


class Injector:
    """Carries out one fault after the other, in the thread that calls it."""

    def __init__(self, grid: Chaos, keeper: Keeper, waker: Waker, database: Server | None) -> None:
        self._grid, self._keeper, self._waker, self._database = grid, keeper, waker, database
        self._client = grid.client()
        self._marks = MarkReader(grid.ground)
        self._log = grid.ground / "faults"
        self._began = time.monotonic()
        self.done: Counter[str] = Counter()

    def run(self, faults: list[Fault], until: float) -> None:
        """Until all are done, or a moment of the monotonic clock has come."""
        began = time.monotonic()
        for fault in faults:
            if time.monotonic() >= until:
                break
            time.sleep(max(0.0, began + fault.at - time.monotonic()))
            mark = self._moment(fault)
            self._strike(fault, mark)
        self._client.close()

    def _moment(self, fault: Fault) -> Mark | None:
        """Wait for a planted moment to come; with the mark that told of it."""
        found: Any = None
        if fault.moment == "barrier":
            self._wait(self._is_claiming)
        elif fault.moment in ("forgetting", "draining"):
            for _ in self._marks.new():  # those of before
                pass
            what = "end" if fault.moment == "forgetting" else "loud"
            found = self._wait(lambda: next((mark for mark in self._marks.new() if mark.what == what), None))
        elif fault.moment == "start-up":
            self._kill_daemon(fault, "before")
            self._wait(lambda: self._victims("agent"))
        else:
            return None
        time.sleep(fault.delay)
        return found if isinstance(found, Mark) else None

    def _wait(self, look: Callable[[], object]) -> object:
        end = time.monotonic() + MOMENT_WITHIN
        while time.monotonic() < end:
            if found := look():
                return found
            time.sleep(LOOK)
        return None

    def _is_claiming(self) -> bool:
        try:
            answer = self._client.once("GET", "/api/v1/jobs", params={"state": ["claiming", "starting"], "limit": 1})
            return bool(answer.status_code == 200 and answer.json()["jobs"])
        except httpx2.HTTPError:
            return False

    def _strike(self, fault: Fault, mark: Mark | None) -> None:
        if fault.whom == "database":
            self._restart_database(fault)
            return
        if fault.whom == "daemon" and fault.how == "kill":
            self._kill_daemon(fault, "")
            return
        found = self._wait(lambda: self._chosen_or_instead(fault, mark))
        if isinstance(found, Victim):
            self._signal(fault, found)
        else:
            self._note(fault, "nobody was there")

    def _chosen_or_instead(self, fault: Fault, mark: Mark | None) -> Victim | None:
        whom: Whom | None = fault.whom
        while whom is not None:
            if found := self._chosen(whom, fault, mark):
                return found
            whom = INSTEAD.get(whom)
        return None

    def _chosen(self, whom: Whom, fault: Fault, mark: Mark | None) -> Victim | None:
        found = self._victims(whom)
        cluster = mark.cluster if mark else fault.cluster
        preferred = [one for one in found if one.cluster == cluster] or found
        if mark is not None and whom == "runner":
            preferred = [one for one in found if one.pid == _parent(mark.pid)] or preferred
        chosen = preferred[int(fault.pick * len(preferred))] if preferred else None
        for one in found:
            if one is not chosen:
                one.close()
        return chosen

    def _victims(self, whom: Whom) -> list[Victim]:
        directory = self._grid.directory
        daemon = self._grid.daemon
        assert daemon is not None
        match whom:
            case "daemon":
                one = victims.victim("daemon", daemon.pid, directory) if daemon.poll() is None else None
                return [one] if one is not None else []
            case "agent":
                return victims.agents(daemon.pid, directory)
            case "lrm":
                return victims.managers(directory)
            case "runner":
                return victims.runners(directory)
            case "mpi":
                return victims.mpi_daemons(directory)
        return []

    def _signal(self, fault: Fault, chosen: Victim) -> None:
        sent = chosen.signal(signal.SIGSTOP if fault.how == "stop" else signal.SIGKILL)
        self._note(fault, f"{chosen.kind} {chosen.pid} {chosen.cluster}" if sent else "it had just gone")
        if sent:
            self.done[f"{fault.how} {chosen.kind}"] += 1
        if sent and fault.how == "stop":
            self._waker.add(chosen, fault.seconds)
        else:
            chosen.close()

    def _kill_daemon(self, fault: Fault, when: str) -> None:
        """As the kernel would: the keeper starts it again."""
        with self._keeper.starting:  # one that has not said its first line is not killed for saying none
            daemon = self._grid.daemon
            assert daemon is not None
            self._keeper.pause = 0.0 if when else fault.seconds
            daemon.kill()
            daemon.wait()
        self._note(fault, f"daemon {daemon.pid} {when}".rstrip())
        self.done["kill daemon"] += 1

    def _restart_database(self, fault: Fault) -> None:
        assert self._database is not None
        with self._keeper.starting:
            self._database.stop(signal.SIGINT if fault.how == "fast" else signal.SIGQUIT)
            time.sleep(fault.seconds)
            self._database.start()
        self._note(fault, f"away for {fault.seconds:.2f} s")
        self.done[f"{fault.how} restart of the database"] += 1

    def _note(self, fault: Fault, outcome: str) -> None:
        told = {"at": time.monotonic(), "clock": time.time(), "fault": str(fault), "outcome": outcome}
        with self._log.open("a") as file:
            file.write(json.dumps(told) + "\n")


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
