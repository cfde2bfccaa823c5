"""A process that holds one DRMAA session for an agent: run as ``worker.py PARENT_PID CONTACT``.

A DRMAA library is foreign code that may hang, exit or crash; here it takes nothing with it. One line of JSON is one
message: requests on standard input, replies and notices of ended jobs on what was standard output. The library itself
may write to standard output, so that descriptor is led to standard error first. Standard library only, and not
imported by the agent: importing ``drmaa`` loads the C library.

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
from collections.abc import Callable
from typing import Any

EXIT_TIMEOUT = 5.0
"""Seconds for an orderly end of the session once there is nobody to work for."""
POLL_INTERVAL = 0.1
"""Seconds between two questions to the library whether a job has ended, while there are any."""
POLL_COST_FACTOR = 10
"""How many times as long as such a look took, the next one is waited for at least."""
_PR_SET_PDEATHSIG = 1


class NoUsage(Exception):
    """The job has ended, and the library knows no more of it."""


class ErrorText:
    """What the library wrote into a buffer, as the package reads it."""

    class Bytes(bytes):
        def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
            return super().decode(encoding, errors)

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    @property
    def value(self) -> bytes:
        return self.Bytes(self._buffer.value)


class Worker:
    """The session and the jobs submitted through it that have not ended."""

    def __init__(self, drmaa: Any, out: int) -> None:
        self._drmaa = drmaa
        self._session = drmaa.Session()
        self._out = out
        self._jobs: set[str] = set()

    def serve(self, contact: str, requests: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
        """Until there is a None among the requests."""
        self._session.initialize(contact or None)
        try:
            self.send({"hello": self._about()})
            next_poll = 0.0
            while True:
                if self._jobs and (began := time.monotonic()) >= next_poll:
                    self._report_ended()
                    ended = time.monotonic()
                    next_poll = ended + max(POLL_INTERVAL, POLL_COST_FACTOR * (ended - began))
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

    def _about(self) -> dict[str, str]:
        session = self._session
        return {
            "system": session.drmsInfo,
            "implementation": session.drmaaImplementation,
            "version": f"{session.version}",
        }

    def _answer(self, request: dict[str, Any]) -> None:
        act = {"submit": self._submit, "cancel": self._cancel, "status": self._status}[request["op"]]
        try:
            reply: Any = act(request)
        except Exception as error:  # noqa: BLE001 other jobs' exit codes must not be lost by it
            self.send({"id": request["id"], "error": type(error).__name__, "text": str(error).strip()})
        else:
            self.send({"id": request["id"], "reply": reply})

    def _submit(self, request: dict[str, Any]) -> str:
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

    def _cancel(self, request: dict[str, Any]) -> None:
        self._session.control(request["job"], "terminate")

    def _status(self, request: dict[str, Any]) -> dict[str, str]:
        """Of each job its DRMAA state, or the name of the error that the question gave."""
        states = {}
        for job in request["jobs"]:
            try:
                states[job] = self._session.jobStatus(job)
            except self._drmaa.errors.DrmaaException as error:
                states[job] = type(error).__name__
        return states

    def _report_ended(self) -> None:
        """Each by its own id: an answer about any job would not name one of which no usage is known."""
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
            except Exception as error:  # noqa: BLE001 other jobs' exit codes must not be lost by it
                print(f"wait for job {job}: {error!r}", file=sys.stderr, flush=True)
                continue  # if the library has let go of the job, it says so the next time
            else:
                ended = {
                    "job": job,
                    "exit_code": info.exitStatus if info.hasExited else None,
                    "signal": info.terminatedSignal if info.hasSignal else "",
                    "aborted": info.wasAborted,
                }
            self._jobs.discard(job)
            self.send({"ended": ended})


def _read_or_drop(read_usage: Callable[[Any], dict[str, str]], usage: Any) -> dict[str, str]:
    try:
        return read_usage(usage)
    except Exception:  # noqa: BLE001 the library may put anything there
        return {}


def load() -> Any:
    """The package, and with it the C library."""
    import drmaa
    import drmaa.errors

    # For "no usage" the package raises a plain Exception, which nobody can tell from others.
    known = getattr(drmaa.errors, "_ERRORS", [])
    drmaa.errors._ERRORS = [NoUsage if each is Exception else each for each in known]
    # The usage is not needed, and one that cannot be read would hide the exit code.
    session = sys.modules.get("drmaa.session")
    if (read_usage := getattr(session, "adapt_rusage", None)) is not None:
        session.adapt_rusage = lambda usage: _read_or_drop(read_usage, usage)  # type: ignore[union-attr]
    # What is not UTF-8 in a text would hide the error.
    if (buffer := getattr(drmaa.errors, "error_buffer", None)) is not None:
        drmaa.errors.error_buffer = ErrorText(buffer)
    return drmaa


def read(requests: "queue.SimpleQueue[dict[str, Any] | None]", asked_to_end: int) -> None:
    """Pass requests on until the input ends or a signal comes; then see to it that this process ends."""
    buffer = b""
    while True:
        ready, _, _ = select.select([0, asked_to_end], [], [])
        data = os.read(0, 65536) if 0 in ready else b""
        if not data or asked_to_end in ready:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            requests.put(json.loads(line))
    requests.put(None)
    threading.Event().wait(EXIT_TIMEOUT)
    os._exit(1)  # the library hangs


def main() -> int:
    parent, contact = int(sys.argv[1]), sys.argv[2]
    out = os.dup(1)
    os.dup2(2, 1)
    asked_to_end, wake = os.pipe()
    os.set_blocking(wake, False)
    # The number of a signal arrives in the pipe even while the library does not return.
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=read, args=(requests, asked_to_end), daemon=True).start()
    try:
        drmaa = load()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        os.write(out, json.dumps({"failed": "package" if missing else "library", "text": str(error)}).encode() + b"\n")
        return 1
    worker = Worker(drmaa, out)
    try:
        worker.serve(contact, requests)
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
