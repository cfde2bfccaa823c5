"""The command line of Apptainer, which the machines of the tests do not have. Ring 2 runs Charliecloud."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from koalapy.runner.containers import Container
from koalapy.runner.settings import Failure


@pytest.fixture
def container(tmp_path: Path) -> Container:
    program = tmp_path / "singularity"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    plan: Any = SimpleNamespace(me={"cluster": "north"})
    settings: Any = SimpleNamespace(name="north-1", stage="/usr/share", scratch="")
    return Container("/etc/passwd", plan, settings, {"KOALA_CONTAINER_RUNTIME": "apptainer", "PATH": str(tmp_path)})


def test_apptainer_binds_the_folders_of_the_job(container: Container, tmp_path: Path) -> None:
    words = container.wrap_command(["prog", "-x"], "/usr/share/doc", "/var/tmp")
    assert words[words.index(str(tmp_path / "singularity")) :] == [
        *(str(tmp_path / "singularity"), "exec", "--bind=/usr/share/doc", "--bind=/var/tmp", "--bind=/usr/share"),
        *("--pwd=/usr/share/doc", "/etc/passwd", "prog", "-x"),
    ]


@pytest.mark.parametrize("name", ["a,b", "a:ro"])
def test_folder_that_apptainer_would_misread_is_rejected(container: Container, name: str) -> None:
    folder = Path("/var/tmp", f"{os.getpid()}-{name}")
    folder.mkdir()
    try:
        with pytest.raises(Failure, match="choose one without commas and colons"):
            container.wrap_command(["prog"], str(folder), "/tmp")
    finally:
        folder.rmdir()
