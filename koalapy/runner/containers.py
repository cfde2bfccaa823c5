"""Run a program in a container image by the runtime of its cluster: Apptainer or Charliecloud.

``mpirun`` and its daemons run outside, each rank in its own container.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal

from koalapy.runner.processes import find_program
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from koalapy.runner.plan import Node, Plan
    from koalapy.runner.settings import Settings

PROGRAMS = {"apptainer": ("apptainer", "singularity"), "charliecloud": ("ch-run",)}
"""Programs of each runtime, the first that exists is used."""
OF_HOST = ("LD_LIBRARY_PATH", "OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")
"""Variables that name folders outside of the image."""
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMAGE_ENVIRONMENT = "ch/environment"
"""File of a Charliecloud image with its variables."""
ALWAYS_BOUND = ("/tmp", "/dev", "/proc", "/sys")
"""Folders that both runtimes share with the host."""
VERSION_TIMEOUT_S = 60.0
MAX_ANSWER_SIZE = 65536
VERSION = re.compile(r"\((?:Open MPI|OpenRTE)\) (\d+)(\S*)")


class Container:
    """The image and the runtime of a job's programs on this node. Raise ``Failure`` if one does not exist."""

    def __init__(self, image: str, plan: Plan, settings: Settings, environment: Mapping[str, str]) -> None:
        cluster, node = plan.me["cluster"], settings.name
        setting = f"clusters.{cluster}.container_runtime"
        self.runtime = environment.get("KOALA_CONTAINER_RUNTIME", "")
        if self.runtime not in PROGRAMS:
            raise Failure(f"the agent of {cluster} has no container runtime: set {setting} in its configuration too")
        names = PROGRAMS[self.runtime]
        programs = [path for name in names if (path := find_program(name, dict(environment)))]
        if not programs:
            raise Failure(f"{setting} is {self.runtime}, but node {node} has no {' or '.join(names)}: install it")
        self._program, self.image = programs[0], image
        if not os.path.exists(image):
            raise Failure(f"there is no container image {image} on node {node} of {cluster}", 127)
        if not os.access(image, os.R_OK):
            raise Failure(f"the container image {image} on node {node} of {cluster} may not be read", 126)
        scratch = environment.get("KOALA_SCRATCH")
        self._wanted = [path for path in (settings.stage, scratch) if path]
        """Folders that programs may use, as far as they exist here and, for Charliecloud, in the image."""

    def wrap_command(self, command: Sequence[str], folder: str, temporary: str) -> list[str]:
        """Return the command that runs ``command`` in a container, in ``folder``.

        ``temporary``: the folder of this run, which the program must reach. Raise ``Failure`` if the image has no place
        for one of these folders.
        """
        bound = self._bound_folders(folder, temporary)
        hidden = [word for name in OF_HOST for word in ("-u", name)]
        if self.runtime == "apptainer":
            binds = [f"--bind={path}" for path in bound]
            return ["/usr/bin/env", *hidden, self._program, "exec", *binds, f"--pwd={folder}", self.image, *command]
        variables = [f"--set-env=TMPDIR={temporary}"]
        if os.path.isfile(file := os.path.join(self.image, IMAGE_ENVIRONMENT)):
            variables.append(f"--set-env={file}")
        # Charliecloud needs USER, and mounts the folder TMPDIR of its own environment as /tmp.
        environment = ["/usr/bin/env", *hidden, "-u", "TMPDIR", f"PATH={IMAGE_PATH}", f"USER={_account_name()}"]
        binds = [f"--bind={path}" for path in bound]
        return [*environment, self._program, *variables, *binds, f"--cd={folder}", self.image, "--", *command]

    def _bound_folders(self, folder: str, temporary: str) -> list[str]:
        """Return the folders to bind, in order. Raise ``Failure`` if a necessary one cannot be bound."""
        bound: list[str] = []
        for path in dict.fromkeys((folder, temporary, *self._wanted)):
            is_necessary = path in (folder, temporary)
            if any(is_below(path, other) for other in (*ALWAYS_BOUND, *bound)) or not os.path.isdir(path):
                continue
            if self.runtime == "charliecloud" and not os.path.isdir(self.image + path):
                if not is_necessary:
                    continue
                raise Failure(
                    f"the container image {self.image} has no folder {path}, where Charliecloud could bind that of "
                    "the job: create it in the image, or choose a folder below /tmp",
                    126,
                )
            if self.runtime == "apptainer" and set(path) & set(",:"):
                raise Failure(f"Apptainer cannot bind the folder {path}: choose one without commas and colons", 126)
            bound.append(path)
        return bound


class SeriesCheck:
    """A run of ``mpirun --version`` in an image, which must have an Open MPI of the series of this node's ``mpirun``.

    With another one, each rank would run alone. The runner serves its agent during the run.
    """

    def __init__(self, node: Node, container: Container, environment: dict[str, str], folder: str) -> None:
        """Start it. ``environment``: that of ranks. Raise ``Failure``."""
        self._loop, self._image, self._answer, self._is_late = node.loop, container.image, b"", False
        self._alarm = f"image-{folder}"
        self._reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._loop.watch(self._reading, lambda _events: self._read())
        try:
            command = container.wrap_command(["mpirun", "--version"], folder, folder)
            self.pid = node.spawn(command, environment, outputs=(writing, writing))
        except Failure:
            self.close()
            raise
        finally:
            os.close(writing)
        self._loop.set_alarm(self._alarm, VERSION_TIMEOUT_S, self._give_up)

    def close(self) -> None:
        self._loop.cancel_alarm(self._alarm)
        self._loop.forget(self._reading)
        os.close(self._reading)

    def finish(self, series: int, version: str) -> None:
        """Raise ``Failure`` unless the image has Open MPI of the ``series``; ``version``: that of ``mpirun``.

        To be called when its process has ended.
        """
        while self._read():
            pass
        self.close()
        if self._is_late:
            text = f"mpirun has not answered for {VERSION_TIMEOUT_S:g} s"
            raise Failure(f"cannot run the container image {self._image}: {text}", 126)
        text = self._answer.decode(errors="replace")
        found = VERSION.search(text)
        if found is None:
            reason = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "no output")
            raise Failure(
                f"no mpirun of Open MPI runs in the container image {self._image} ({reason}): add Open MPI {series} to "
                "it, or use --launcher processes for a program without MPI",
                126,
            )
        if found[1] != str(series):
            raise Failure(
                f"the container image {self._image} has Open MPI {found[1]}{found[2]}, but mpirun of this cluster is "
                f"of Open MPI {version}: each rank would run alone; use an image with Open MPI {series}",
                126,
            )

    def _read(self) -> bool:
        """Read some output, and keep its last part. Return whether there may be more."""
        try:
            output = os.read(self._reading, MAX_ANSWER_SIZE)
        except BlockingIOError:
            return False
        if not output:
            self._loop.forget(self._reading)
        self._answer = (self._answer + output)[-MAX_ANSWER_SIZE:]
        return bool(output)

    def _give_up(self) -> None:
        """Kill the process and what it has started; its end is handled as any other."""
        self._is_late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder or something in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def find_container(plan: Plan, settings: Settings, environment: Mapping[str, str]) -> Container | None:
    """Return the container of this node's programs; None if the job has none. Raise ``Failure``."""
    image = plan.context.get("container")
    return Container(image, plan, settings, environment) if image else None


def _account_name() -> str:
    """Return the name of this process's account, or its number if it has none."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
