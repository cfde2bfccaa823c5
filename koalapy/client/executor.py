"""An executor of ``concurrent.futures`` that runs calls as tasks of arrays.

Calls that are submitted within a moment become one array. Functions, arguments and results are pickled: results run as
code in this process as soon as a task ends, so only clusters that the user trusts with that may run them.
"""

import os
import pickle
import shlex
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from koalapy.client import remote_call
from koalapy.client.archive import upload_files
from koalapy.client.client import FINAL, Absence, Client
from koalapy.client.errors import Exit, GridError
from koalapy.client.http import Json
from koalapy.client.jobs import Job
from koalapy.client.results import unpack_results
from koalapy.client.submission import build_submission, list_of

P = ParamSpec("P")
T = TypeVar("T")
BATCH_DELAY_S = 0.05
"""Time in which further calls join the array of the first one."""
MAX_BATCH, MAX_BATCH_BYTES = 1000, 64 * 1024 * 1024
"""Calls of one array, and the bytes after which it gets no further one."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 2.0
"""Pauses between two requests for the states of the tasks; they grow while nothing changes."""


class TaskFuture(Future[T]):
    """The result of a call. ``job`` is its task, None until it is submitted. ``cancel`` also ends a running call."""

    job: Job | None = None


class GridExecutor(Executor):
    """An executor that runs each call as a task on the grid. Made by ``Grid.executor``; use it in a ``with`` block.

    A future raises the exception of its call, or ``GridError`` if the call could not be made, or ended without a
    result. A task that the infrastructure fails is repeated by the grid.
    """

    def __init__(self, client: Client, python: str, at_once: int | None, options: Json) -> None:
        self._client, self._python, self._at_once, self._options = client.clone_for_thread(), python, at_once, options
        self._dumps: Callable[[Any], bytes] = pickle.dumps
        with suppress(ImportError):
            self._dumps = import_module("cloudpickle").dumps
        self._changed = threading.Condition()
        self._calls: list[tuple[bytes, TaskFuture[Any]]] = []
        self._tasks: dict[int, TaskFuture[Any]] = {}
        self._is_shut = False
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> TaskFuture[T]:
        """Run ``fn(*args, **kwargs)`` as a task, and return its future.

        The function is that of a module which the nodes can import, or of the script that runs; cloudpickle, if it is
        installed here and there, also allows lambdas and functions of notebooks. Raise ``GridError`` for others.
        """
        call, future = self._dump_call(fn, args, kwargs), TaskFuture[T]()
        with self._changed:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append((call, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop accepting calls, and wait until all have ended. ``cancel_futures``: cancel their tasks first."""
        with self._changed:
            self._is_shut = True
            futures = [*(future for _, future in self._calls), *self._tasks.values()]
            self._changed.notify()
        for future in futures if cancel_futures else ():
            future.cancel()
        if wait and self._thread is not None:
            self._thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls; after an interrupt cancel them."""
        try:
            self.shutdown(cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))
        except KeyboardInterrupt:
            self.shutdown(cancel_futures=True)
            raise

    def _dump_call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Json) -> bytes:
        """Return a call as bytes. Raise ``GridError`` if it cannot be sent."""
        try:
            call = self._dumps((function, arguments, keywords))
            if self._needs_script(call) and not hasattr(sys.modules["__main__"], "__file__"):
                raise pickle.PicklingError("it is defined in no file")
            return call
        except Exception as error:
            name = getattr(function, "__qualname__", function)
            hint = "define it in a module or script, or install cloudpickle here and on the nodes"
            raise GridError(f"the call of {name} cannot be sent: {error}", Exit.USAGE, hint, "fn") from error

    def _needs_script(self, call: bytes) -> bool:
        """Return whether a call names something that the script of this process defines."""
        return self._dumps is pickle.dumps and b"__main__" in call

    def _run(self) -> None:
        """Submit the calls and take their results, until the executor is shut down. Runs in its own thread."""
        pause, absence = MIN_PAUSE_S, Absence(self._client)
        while True:
            with self._changed:
                if not self._calls and not (self._is_shut and not self._tasks):
                    self._changed.wait(pause if self._tasks else None)
                if self._is_shut and not self._calls and not self._tasks:
                    return
                has_calls = bool(self._calls)
            if has_calls:
                self._client.timeouts.sleep(BATCH_DELAY_S)
                self._submit_batch()
            if self._tasks:
                try:
                    has_changed = self._take_results()
                    absence.end()
                except GridError as error:
                    has_changed = False
                    try:
                        absence.tolerate(error)
                    except GridError:
                        self._fail(self._tasks.values(), error)
                        self._tasks.clear()
                pause = MIN_PAUSE_S if has_calls or has_changed else min(2 * pause, MAX_PAUSE_S)

    def _submit_batch(self) -> None:
        """Submit the next calls as one array. Until then they stay in ``_calls``, where ``shutdown`` finds them."""
        count, size = 0, 0
        while count < min(len(self._calls), MAX_BATCH) and size < MAX_BATCH_BYTES:
            size += len(self._calls[count][0])
            count += 1
        batch = [(call, future) for call, future in self._calls[:count] if not _end_cancelled(future)]
        try:
            array = self._submit_array([call for call, _ in batch]) if batch else 0
            for number, (_, future) in enumerate(batch, array + 1):
                future.job = Job(self._client, {"id": number})
                self._tasks[number] = future
        except Exception as error:  # noqa: BLE001 # files that cannot be read, a rejection: each future has it
            self._fail([future for _, future in batch], error)
        with self._changed:
            del self._calls[:count]

    def _submit_array(self, calls: list[bytes]) -> int:
        """Send the calls and submit an array with a task for each; return its id."""
        limit = "" if self._at_once is None else f"%{self._at_once}"
        command = [self._python, Path(remote_call.__file__).name]
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        options = {
            **self._options,
            "array": f"1-{len(calls)}{limit}",
            "script": script,
            "collect": [remote_call.RESULT, *list_of(self._options.get("collect", ()))],
        }
        with TemporaryDirectory() as folder:
            calls_file = Path(folder, remote_call.CALLS)
            calls_file.write_bytes(pickle.dumps(calls))
            files = [remote_call.__file__, str(calls_file), *list_of(self._options.get("stage", ()))]
            if any(map(self._needs_script, calls)):
                files.append(shutil.copy(sys.modules["__main__"].__file__ or "", Path(folder, remote_call.SCRIPT)))
            body, paths = build_submission(["call"], options | {"stage": files})
            body["bundle"] = upload_files(self._client, paths)
        return int(self._client.submit(body, os.urandom(16).hex())["id"])

    def _take_results(self) -> bool:
        """Set the results of the tasks that have ended, cancel those of cancelled futures; return whether any was."""
        cancelled = [task for task, future in self._tasks.items() if future.cancelled()]
        for _ in self._client.act_on_jobs("cancel", cancelled, {}):
            pass
        for task in cancelled:
            _end_cancelled(self._tasks.pop(task))
        has_ended = False
        for answer in self._client.states(list(self._tasks)):
            if answer["state"] is not None and answer["state"] not in FINAL:
                continue
            task, future = answer["job"], self._tasks[answer["job"]]
            try:
                has_raised, value, trace = self._read_result(task)
            except BaseException as error:  # reading a result runs any code
                if isinstance(error, GridError) and error.may_recover:
                    raise
                has_raised, value, trace = True, error, ""
            del self._tasks[task]
            has_ended = True
            if future.set_running_or_notify_cancel():
                if trace:
                    value.add_note(f"On the grid, as job {task}:\n{trace}")
                (future.set_exception if has_raised else future.set_result)(value)
        return has_ended or bool(cancelled)

    def _read_result(self, task: int) -> Any:
        """Return what ``remote_call`` has sent. Raise ``GridError`` if the task has ended without a result."""
        with TemporaryDirectory() as folder:
            try:
                unpack_results(self._client.stream_results(task), Path(folder), force=True)
            except GridError as error:
                if error.code is not Exit.NOT_FOUND:
                    raise
            if result := next(Path(folder).glob(f"*/{remote_call.RESULT}"), None):
                sys.modules.setdefault(remote_call.MAIN, sys.modules["__main__"])
                return pickle.loads(result.read_bytes())
        job = self._client.job(task)
        message = f"job {task} {job['state']} without a result: {job['reason']}"
        raise GridError(message, Exit.FAILED, f"see koala logs {task}")

    @staticmethod
    def _fail(futures: Any, error: Exception) -> None:
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _end_cancelled(future: Future[Any]) -> bool:
    """Return whether a future is cancelled. If so, notify its waiters."""
    return future.cancelled() and not future.set_running_or_notify_cancel()
