"""Inject the planned faults, and log them."""

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
from tests.chaos.faults import Fault, Target
from tests.chaos.grid import ChaosGrid
from tests.chaos.marks import Mark, MarkReader
from tests.chaos.victims import Victim
from tests.store.postgresql import Server

TIMING_TIMEOUT_S = 3.0
"""Seconds to wait for the timing condition of a fault before it is injected anyway."""
POLL_INTERVAL_S = 0.03
FALLBACK_TARGETS: dict[Target, Target] = {"mpi": "runner", "runner": "agent"}
"""The target to use if there is no candidate of another."""


class DaemonKeeper(threading.Thread):
    """Restart the daemon after each kill; another end is a trouble."""

    def __init__(self, grid: ChaosGrid, troubles: list[str]) -> None:
        super().__init__(name="keeper", daemon=True)
        self._grid, self._troubles = grid, troubles
        self.pause = 0.0
        self.starting = threading.Lock()
        """Locked while the daemon or the database is restarted."""
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
            with self.starting, suppress(RuntimeError):  # the reason is in its log; the next pass tries again
                self._grid.begin()

    def close(self) -> None:
        self._over.set()
        self.join()


class Waker(threading.Thread):
    """Resume suspended processes when their time has come."""

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
        """Resume all processes now."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self.join()


class Injector:
    """Inject one fault after another in the calling thread."""

    def __init__(self, grid: ChaosGrid, keeper: DaemonKeeper, waker: Waker, database: Server | None) -> None:
        self._grid, self._keeper, self._waker, self._database = grid, keeper, waker, database
        self._client = grid.client()
        self._marks = MarkReader(grid.folder)
        self._log = grid.folder / "faults"
        self._began = time.monotonic()
        self.done: Counter[str] = Counter()

    def run(self, faults: list[Fault], until: float) -> None:
        """Inject all faults, or those before the monotonic time ``until``."""
        began = time.monotonic()
        for fault in faults:
            if time.monotonic() >= until:
                break
            time.sleep(max(0.0, began + fault.time_s - time.monotonic()))
            mark = self._wait_for_timing(fault)
            self._inject(fault, mark)
        self._client.close()

    def _wait_for_timing(self, fault: Fault) -> Mark | None:
        """Wait for the timing condition of a fault, and return the mark that fulfilled it, if any."""
        marked: Any = None
        if fault.timing == "barrier":
            self._wait(self._is_claiming)
        elif fault.timing in ("forgetting", "draining"):
            for _ in self._marks.new():  # skip older marks
                pass
            event = "end" if fault.timing == "forgetting" else "loud"
            marked = self._wait(lambda: next((mark for mark in self._marks.new() if mark.event == event), None))
        elif fault.timing == "start-up":
            self._kill_daemon(fault, "before")
            self._wait(lambda: self._find_candidates("agent"))
        else:
            return None
        time.sleep(fault.delay)
        return marked if isinstance(marked, Mark) else None

    def _wait(self, condition: Callable[[], object]) -> object:
        end = time.monotonic() + TIMING_TIMEOUT_S
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(POLL_INTERVAL_S)
        return None

    def _is_claiming(self) -> bool:
        try:
            answer = self._client.send("GET", "/api/v1/jobs", params={"state": ["claiming", "starting"], "limit": 1})
            return bool(answer.status_code == 200 and answer.json()["jobs"])
        except httpx2.HTTPError:
            return False

    def _inject(self, fault: Fault, mark: Mark | None) -> None:
        if fault.target == "database":
            self._restart_database(fault)
            return
        if fault.target == "daemon" and fault.method == "kill":
            self._kill_daemon(fault, "")
            return
        victim = self._wait(lambda: self._choose_with_fallback(fault, mark))
        if isinstance(victim, Victim):
            self._signal(fault, victim)
        else:
            self._log_fault(fault, "no candidate")

    def _choose_with_fallback(self, fault: Fault, mark: Mark | None) -> Victim | None:
        target: Target | None = fault.target
        while target is not None:
            if victim := self._choose(target, fault, mark):
                return victim
            target = FALLBACK_TARGETS.get(target)
        return None

    def _choose(self, target: Target, fault: Fault, mark: Mark | None) -> Victim | None:
        candidates = self._find_candidates(target)
        cluster = mark.cluster if mark else fault.cluster
        preferred = [candidate for candidate in candidates if candidate.cluster == cluster] or candidates
        if mark is not None and target == "runner":
            preferred = [candidate for candidate in candidates if candidate.pid == _read_parent(mark.pid)] or preferred
        chosen = preferred[int(fault.pick * len(preferred))] if preferred else None
        for candidate in candidates:
            if candidate is not chosen:
                candidate.close()
        return chosen

    def _find_candidates(self, target: Target) -> list[Victim]:
        directory = self._grid.directory
        daemon = self._grid.daemon
        assert daemon is not None
        match target:
            case "daemon":
                process = victims.open_victim("daemon", daemon.pid, directory) if daemon.poll() is None else None
                return [process] if process is not None else []
            case "agent":
                return victims.find_agents(daemon.pid, directory)
            case "lrm":
                return victims.find_resource_managers(directory)
            case "runner":
                return victims.find_runners(directory)
            case "mpi":
                return victims.find_mpi_daemons(directory)
        return []

    def _signal(self, fault: Fault, chosen: Victim) -> None:
        sent = chosen.signal(signal.SIGSTOP if fault.method == "stop" else signal.SIGKILL)
        self._log_fault(fault, f"{chosen.kind} {chosen.pid} {chosen.cluster}" if sent else "it had just ended")
        if sent:
            self.done[f"{fault.method} {chosen.kind}"] += 1
        if sent and fault.method == "stop":
            self._waker.add(chosen, fault.seconds)
        else:
            chosen.close()

    def _kill_daemon(self, fault: Fault, timing: str) -> None:
        """Kill the daemon by SIGKILL; the keeper restarts it."""
        with (
            self._keeper.starting
        ):  # a starting daemon is not killed, since the keeper would report its missing first line
            daemon = self._grid.daemon
            assert daemon is not None
            self._keeper.pause = 0.0 if timing else fault.seconds
            daemon.kill()
            daemon.wait()
        self._log_fault(fault, f"daemon {daemon.pid} {timing}".rstrip())
        self.done["kill daemon"] += 1

    def _restart_database(self, fault: Fault) -> None:
        assert self._database is not None
        with self._keeper.starting:
            self._database.stop(signal.SIGINT if fault.method == "fast" else signal.SIGQUIT)
            time.sleep(fault.seconds)
            self._database.start()
        self._log_fault(fault, f"away for {fault.seconds:.2f} s")
        self.done[f"{fault.method} restart of the database"] += 1

    def _log_fault(self, fault: Fault, outcome: str) -> None:
        entry = {"at": time.monotonic(), "clock": time.time(), "fault": str(fault), "outcome": outcome}
        with self._log.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _read_parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
