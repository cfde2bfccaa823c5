"""A fake of the drmaa package. Jobs are files, and tests can make the library fail in every way."""

import json
import os
import signal
import sys
import threading
from collections import namedtuple
from pathlib import Path

from drmaa import errors

if os.environ.get("DRMAA_LIBRARY_PATH") == "/no/such/library":
    raise OSError("/no/such/library: cannot open shared object file: No such file or directory")

_STATE = Path(os.environ["FAKE_DRMAA"])
JobInfo = namedtuple("JobInfo", "hasExited hasSignal terminatedSignal wasAborted exitStatus")


def _record(event):
    with open(_STATE / "calls", "a") as calls:
        calls.write(event + "\n")


def _misbehave(how):
    """Fail as a file in the state folder requests: raise, crash, exit, hang or write to standard output."""
    path = _STATE / how
    if not path.exists():
        return
    mode = path.read_text().strip()
    if mode == "crash":
        os.write(2, b"libdrmaa: assertion failed\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    elif mode == "exit":
        os._exit(3)
    elif mode == "hang":
        threading.Event().wait()
    elif mode == "chatter":
        os.write(1, b"{libdrmaa says hello\n")
    elif mode == "ValueError":
        raise ValueError("not of DRMAA")
    elif mode:
        raise getattr(errors, mode)(f"code 99: {mode} it is\n")


class JobTemplate:
    pass


class Session:
    TIMEOUT_NO_WAIT = 0
    drmsInfo = "Fake 1.0"
    drmaaImplementation = "Fake 1.0"
    version = "1.0"

    def initialize(self):
        _misbehave("initialize")
        _record("initialize " + json.dumps({"environment": sorted(os.environ), "pid": os.getpid()}))

    def exit(self):
        _misbehave("leave")
        _record("exit")

    def createJobTemplate(self):
        return JobTemplate()

    def deleteJobTemplate(self, template):
        pass

    def runJob(self, template):
        _misbehave("runJob")
        number = 1 + len(list(_STATE.glob("job-*")))
        (_STATE / f"job-{number}").write_text("running")
        _record("runJob " + json.dumps(vars(template), sort_keys=True))
        return str(number)

    def control(self, job, action):
        _misbehave("control")
        if not (_STATE / f"job-{job}").exists():
            raise errors.InvalidJobException("code 18: no such job")
        _record(f"{action} {job}")

    def jobStatus(self, job):
        _misbehave("jobStatus")
        path = _STATE / f"job-{job}"
        if not path.exists():
            raise errors.InvalidJobException("code 18: no such job")
        return path.read_text().split()[0]

    def wait(self, job, timeout):
        """Return the end of a job. Its file holds its state, and after the end the answer of wait()."""
        _state, *fields = (_STATE / f"job-{job}").read_text().split()
        if fields[:1] == ["odd"]:
            (_STATE / f"job-{job}").write_text("done reaped")
            raise ValueError("not enough values to unpack")
        if fields == ["reaped"]:
            raise errors.InvalidJobException("code 18: no such job")
        if not fields:
            raise errors.ExitTimeoutException("code 23: timeout")
        if fields[0] == "nothing":
            raise errors._ERRORS[0]("code 24: no usage")
        if fields[0] == "signal":
            return JobInfo(False, True, fields[1], False, 0)
        if fields[0] == "aborted":
            return JobInfo(False, False, "", True, 0)
        return JobInfo(True, False, "", False, int(fields[1]))


assert sys.flags.utf8_mode
