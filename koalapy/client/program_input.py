"""Send standard input of this process to the program of an interactive job, and stay connected until the job ends."""

import os
import select
import threading
from collections.abc import Callable

from koalapy.client.client import Client
from koalapy.client.errors import GridError
from koalapy.client.node_stream import NodeStream
from koalapy.runner.streams import STREAM_PIECE, STREAM_WINDOW

RETRY_DELAY_S = 1.0
"""Pause before a new connection to a daemon or node that was lost."""


class ProgramInput:
    """Threads that read a file and send it to a job's program, each byte once also after lost connections.

    The bytes that the program has not read yet, at most ``STREAM_WINDOW``, are kept for the next connection.
    """

    def __init__(
        self,
        client: Client,
        job: int,
        file: int | None,
        fail: Callable[[str], None],
        retry_delay_s: float = RETRY_DELAY_S,
    ) -> None:
        """``file``: None to stay connected without input. ``fail`` is called if input is lost."""
        self._client, self._job, self._file, self._fail = client.clone_for_thread(), job, file, fail
        self._retry_delay_s = retry_delay_s
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._kept = bytearray()
        """Bytes of the file from offset ``_used`` on."""
        self._used = self._sent = 0
        self._is_complete, self._is_end_sent = file is None, False
        self._stream: NodeStream | None = None
        self._threads = [threading.Thread(target=self._stay_connected, daemon=True)]
        if file is not None:
            self._threads.append(threading.Thread(target=self._read_file, args=(file,), daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Disconnect, since the job has ended or is cancelled."""
        self._over.set()
        with self._changed:
            stream, self._stream = self._stream, None
            self._changed.notify_all()
        if stream is not None:
            stream.close()

    def _read_file(self, file: int) -> None:
        """Read the file as fast as the program reads it. Runs in its own thread, which may wait for input forever."""
        while not self._is_complete and not self._over.is_set():
            with self._changed:
                while len(self._kept) >= STREAM_WINDOW and not self._over.is_set():
                    self._changed.wait()
            try:
                data = os.read(file, min(STREAM_PIECE, STREAM_WINDOW - len(self._kept)))
            except BlockingIOError:  # another program has made the file non-blocking
                select.select([file], [], [])
                continue
            except OSError:  # closed, or a terminal of which this process is in the background
                data = b""
            with self._changed:
                self._kept += data
                self._is_complete = not data
                self._changed.notify_all()
            self._send_kept()

    def _send_kept(self) -> None:
        """Send what the file has beyond the bytes that were sent on this connection."""
        with self._changed:
            stream = self._stream
            if stream is None:
                return
            try:
                if data := bytes(self._kept[self._sent - self._used :]):
                    stream.send_input(data)
                    self._sent += len(data)
                if self._is_complete and not self._is_end_sent and self._file is not None:
                    self._is_end_sent = True
                    stream.send_message(end_of_input=True)
            except OSError:
                self._stream = None  # the thread that receives connects again

    def _stay_connected(self) -> None:
        """Connect, also after a connection was lost, until the job has ended. Runs in its own thread."""
        while not self._over.is_set():
            try:
                stream = self._client.open_stream(self._job, "input")
            except GridError as error:
                if not error.may_recover:
                    return  # the job has ended; waiting for it shows how
            else:
                self._serve(stream)
            self._over.wait(self._retry_delay_s)

    def _serve(self, stream: NodeStream) -> None:
        """Send input on one connection, and note what the program has read, until the connection ends."""
        used = int(stream.opened.get("used", 0))
        with self._changed:
            if "opened" in stream.opened and not self._used <= used <= self._used + len(self._kept):
                self._fail("the program was started again, and its first input is lost")
                self._over.set()
            elif "opened" in stream.opened:
                self._discard(used)
                self._sent, self._is_end_sent, self._stream = used, False, stream
        self._send_kept()
        try:
            while not self._over.is_set():
                message = stream.receive()
                if isinstance(message, dict) and "credit" in message:
                    with self._changed:
                        self._discard(message["credit"])
                        self._changed.notify_all()
                elif isinstance(message, dict) and "end" in message:
                    break
        except OSError:
            pass
        with self._changed:
            self._stream = None
        stream.close()

    def _discard(self, used: int) -> None:
        """Forget the bytes before offset ``used``, which the program has read."""
        if used > self._used:
            del self._kept[: used - self._used]
            self._used = used
