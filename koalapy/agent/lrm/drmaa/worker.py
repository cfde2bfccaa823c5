"""The process that holds one DRMAA session for an agent: ``worker.py PARENT_PID``.

A DRMAA library may hang, exit or crash; here it cannot harm the agent. Messages are JSON, one a line: requests on
standard input, replies and notices of ended jobs on a copy of standard output. The library may write to standard output
itself, so that is redirected to standard error. Standard library only; the agent does not import this module.

request   {"id": 1, "op": "submit", ...}
reply     {"id": 1, "reply": ...} or {"id": 1, "error": "InvalidJobException", "text": "..."}
notice    {"ended": {"job": "12", ...}}, and as the first line {"hello": {...}} or {"failed": "...", "text": "..."}
"""

import ctypes
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from typing import Any

EXIT_TIMEOUT_S = 5.0
"""How long the session may take to close when the agent is gone."""
POLL_INTERVAL_S = 0.05
"""Time between two queries of ended jobs, while there are jobs."""
POLL_COST_FACTOR = 10
"""Minimum time between two queries, as a multiple of the time that the last one took."""
_PR_SET_PDEATHSIG = 1


class NoUsage(Exception):
    """The job has ended, and the library has no exit code of it."""


class ErrorText:
    """The error buffer of the DRMAA package, decoded without errors."""

    class Bytes(bytes):
        def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
            return super().decode(encoding, errors)

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    @property
    def value(self) -> bytes:
        return self.Bytes(self._buffer.value)


class Worker:
    """A DRMAA session, and the jobs submitted through it that have not ended."""

    def __init__(self, drmaa: Any, out: int) -> None:
        self._drmaa = drmaa
        self._session = drmaa.Session()
        self._out = out
        self._jobs: set[str] = set()

    def serve(self, requests: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
        """Answer requests and report ended jobs until a request is None."""
        self._session.initialize()
        try:
            session = self._session
            about = {"system": session.drmsInfo, "implementation": session.drmaaImplementation}
            self.send({"hello": {**about, "version": f"{session.version}"}})
            next_poll = 0.0
            while True:
                if self._jobs and (began := time.monotonic()) >= next_poll:
                    self._report_ended()
                    ended = time.monotonic()
                    next_poll = ended + max(POLL_INTERVAL_S, POLL_COST_FACTOR * (ended - began))
                try:
                    request = requests.get(timeout=max(0.0, next_poll - time.monotonic()) if self._jobs else None)
                except queue.Empty:
                    continue
                if request is None:
                    return
                self._answer(request)
        finally:
            self._session.exit()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]

    def _answer(self, request: dict[str, Any]) -> None:
        """Execute a request and send its reply, or the error that the library raised."""
        operations = {
            "submit": self._submit_job,
            "cancel": lambda request: self._session.control(request["job"], "terminate"),
            "status": self._read_states,
        }
        try:
            reply: Any = operations[request["op"]](request)
        except Exception as error:  # noqa: BLE001 the exit codes of other jobs must not be lost
            self.send({"id": request["id"], "error": type(error).__name__, "text": str(error).strip()})
        else:
            self.send({"id": request["id"], "reply": reply})

    def _submit_job(self, request: dict[str, Any]) -> str:
        """Submit a job by a template and return its identifier."""
        template = self._session.createJobTemplate()
        try:
            template.remoteCommand = request["script"]
            template.jobName = request["name"]
            template.workingDirectory = request["workdir"]
            template.outputPath = f":{request['output']}"
            template.joinFiles = True
            if request["native"]:
                template.nativeSpecification = request["native"]
            job = str(self._session.runJob(template))
        finally:
            self._session.deleteJobTemplate(template)
        self._jobs.add(job)
        return job

    def _read_states(self, request: dict[str, Any]) -> dict[str, str]:
        """Return the DRMAA state of each job, or the name of the error of its query."""
        states = {}
        for job in request["jobs"]:
            try:
                states[job] = self._session.jobStatus(job)
            except self._drmaa.errors.DrmaaException as error:
                states[job] = type(error).__name__
        return states

    def _report_ended(self) -> None:
        """Send the agent how jobs have ended, if any have.

        Query each job by its id: a query for any job would not name a job without usage data.
        """
        errors = self._drmaa.errors
        for job in list(self._jobs):
            try:
                info = self._session.wait(job, self._drmaa.Session.TIMEOUT_NO_WAIT)
            except errors.ExitTimeoutException:
                continue
            except (errors.InvalidJobException, NoUsage):
                ended: dict[str, Any] = {"job": job}
            except errors.DrmaaException:
                continue  # not now
            except Exception as error:  # noqa: BLE001 the exit codes of other jobs must not be lost
                print(f"wait for job {job}: {error!r}", file=sys.stderr, flush=True)
                continue  # if the library has dropped the job, the next query says so
            else:
                ended = {
                    "job": job,
                    "exit_code": info.exitStatus if info.hasExited else None,
                    "signal": info.terminatedSignal if info.hasSignal else "",
                    "aborted": info.wasAborted,
                }
            self._jobs.discard(job)
            self.send({"ended": ended})


def load_drmaa() -> Any:
    """Import and return the DRMAA package, which loads the C library, and work around its faults."""
    import drmaa
    import drmaa.errors

    # The package raises a plain Exception for "no usage".
    errors = getattr(drmaa.errors, "_ERRORS", [])
    drmaa.errors._ERRORS = [NoUsage if error is Exception else error for error in errors]
    # An invalid usage would hide the exit code.
    if (session := sys.modules.get("drmaa.session")) is not None:
        session.adapt_rusage = lambda _: {}  # type: ignore[attr-defined]
    # A text that is not UTF-8 would hide the error.
    if (buffer := getattr(drmaa.errors, "error_buffer", None)) is not None:
        drmaa.errors.error_buffer = ErrorText(buffer)
    return drmaa


def read_requests(requests: "queue.SimpleQueue[dict[str, Any] | None]", signal_pipe: int) -> None:
    """Read requests until the input ends or a signal arrives, then make sure that this process ends."""
    buffer = b""
    while True:
        ready, _, _ = select.select([0, signal_pipe], [], [])
        data = os.read(0, 65536) if 0 in ready else b""
        if not data or signal_pipe in ready:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            requests.put(json.loads(line))
    requests.put(None)
    threading.Event().wait(EXIT_TIMEOUT_S)
    os._exit(1)  # the library hangs


def main() -> int:
    """Serve the agent's requests until it disconnects; return 1 if the library cannot be loaded or opened."""
    parent = int(sys.argv[1])
    out = os.dup(1)
    os.dup2(2, 1)
    signal_pipe, wake = os.pipe()
    os.set_blocking(wake, False)
    # Python writes signals into the pipe even while the library does not return.
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(requests, signal_pipe), daemon=True).start()
    try:
        drmaa = load_drmaa()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        os.write(out, json.dumps({"failed": "package" if missing else "library", "text": str(error)}).encode() + b"\n")
        return 1
    worker = Worker(drmaa, out)
    try:
        worker.serve(requests)
    except drmaa.errors.DrmaaException as error:
        worker.send({"failed": type(error).__name__, "text": str(error).strip()})
        return 1
    except BrokenPipeError:  # the agent is gone
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a library's threads and exit handlers may hang
