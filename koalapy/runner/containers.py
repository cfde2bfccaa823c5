"""Run a program in a container image by the runtime of its cluster: Apptainer or Charliecloud.

``mpirun`` and its daemons run outside, each rank in a container of its own.
"""

from __future__ import annotations

import os
import re

from koalapy.runner.processes import find_program
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from koalapy.runner.plan import Plan
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

    def check_series(self, series: int, version: str, environment: Mapping[str, str], folder: str) -> None:
        """Raise ``Failure`` unless the image has an Open MPI of the ``series`` (major version) of ``mpirun``.

        With another one, each rank would run alone. ``version``: that of ``mpirun``. ``environment``: that of ranks.
        """
        import subprocess

        command = self.wrap_command(["mpirun", "--version"], folder, folder)
        try:
            answer = subprocess.run(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=VERSION_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failure(f"cannot run the container image {self.image}: {error}", 126) from error
        text = answer.stdout.decode(errors="replace")
        found = VERSION.search(text)
        if found is None:
            reason = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "no output")
            raise Failure(
                f"no mpirun of Open MPI runs in the container image {self.image} ({reason}): add Open MPI {series} to "
                "it, or use --launcher processes for a program without MPI",
                126,
            )
        if found[1] != str(series):
            raise Failure(
                f"the container image {self.image} has Open MPI {found[1]}{found[2]}, but mpirun of this cluster is of "
                f"Open MPI {version}: each rank would run alone; use an image with Open MPI {series}",
                126,
            )

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
