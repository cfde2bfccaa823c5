"""Programs in container images, by Charliecloud on an embedded cluster."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid, close_grid
from tests.needs import CHARLIECLOUD, OPEN_MPI_4

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHARLIECLOUD.is_met, reason=CHARLIECLOUD.reason),
    pytest.mark.skipif(not OPEN_MPI_4.is_met, reason=OPEN_MPI_4.reason),
]

CLUSTERS = {
    "north": {"kind": "local", "nodes": 2, "container_runtime": "charliecloud"},
    "south": {"kind": "local", "nodes": 8},
}
TWO = {"type": "flexible", "total_size": 2}
PROGRAM = (
    "import os; from mpi4py.MPI import COMM_WORLD as w; open(f'rank-{w.rank}', 'w').close(); "
    "print(w.allreduce(1), open('/image').read(), os.path.isdir(os.environ['TMPDIR']))"
)
MakeImage = Callable[..., Path]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGrid]:
    directory = tmp_path_factory.mktemp("grid")
    grid = EmbeddedGrid(directory / "data", KOALA_CLUSTERS=json.dumps(CLUSTERS)).start()
    yield grid
    close_grid(grid)


@pytest.fixture(scope="module")
def make_image(tmp_path_factory: pytest.TempPathFactory) -> MakeImage:
    """Return a function that makes an image of hard links to this machine's Python and both series of Open MPI."""

    def make_image(*environment: str) -> Path:
        image = tmp_path_factory.mktemp("image")
        for name in ("dev", "proc", "sys", "tmp", "etc", "home", "root", "run", "usr/bin", "usr/lib64"):
            (image / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (image / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "hosts", "resolv.conf"):
            (image / "etc" / name).touch()
        (image / "image").write_text("inside")
        stdlib, prefix = Path(sysconfig.get_path("stdlib")), Path(sys.prefix)
        interpreter = Path(sys.executable).resolve()
        site_packages = prefix / stdlib.relative_to(sys.base_prefix) / "site-packages"
        library = Path("/usr/lib") / sysconfig.get_config_var("MULTIARCH")
        _link_all(image, Path("/usr/bin/dash"), Path("/usr/bin/orterun"), *library.glob("*.so*"), library / "openmpi")
        _link_all(
            image,
            *Path("/usr/lib64").iterdir(),
            *interpreter.parent.glob("python3*"),
            stdlib,
            *interpreter.parents[1].glob("lib/*.so*"),
        )
        _link_all(image, *prefix.glob("lib/*.so*"), prefix / "lib/openmpi", prefix / "share/openmpi", prefix / "bin")
        _link_all(image, prefix / "share/pmix", prefix / "share/prte", prefix / "etc", prefix / "pyvenv.cfg")
        _link_all(image, site_packages / "mpi4py")
        (image / "usr/bin/sh").symlink_to("dash")
        (image / "usr/bin/mpirun").symlink_to("orterun")
        if environment:
            (image / "ch").mkdir()
            (image / "ch/environment").write_text("".join(f"{line}\n" for line in environment))
        return image

    return make_image


def _link_all(image: Path, *sources: Path) -> None:
    """Link files and folders into an image, at the same paths."""
    for source in sources:
        target = image / source.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() and not target.is_symlink():
            subprocess.run(["cp", "-a", "--link", source, target], check=True)


@pytest.mark.mpi
def test_ranks_in_container_with_open_mpi_of_another_series_are_refused(
    grid: EmbeddedGrid, make_image: MakeImage
) -> None:
    image = make_image()
    command = [sys.executable, "-c", PROGRAM]
    ident = grid.submit(TWO, *command, container=str(image), launcher="openmpi", processes_per_node=1)
    job = grid.wait_for_end(ident)
    assert (job["state"], job["exit_code"], job["restarts"]) == ("failed", 126, 0)
    assert f"the container image {image} has Open MPI 4." in grid.read_output(ident)
    assert "each rank would run alone; use an image with Open MPI 5" in grid.read_output(ident)
    shutil.rmtree(image)


@pytest.mark.mpi
def test_ranks_and_processes_in_container_use_files_of_job_and_image(grid: EmbeddedGrid, make_image: MakeImage) -> None:
    image = make_image(f"PATH={sys.prefix}/bin:/usr/bin:/bin", f"OPAL_PREFIX={sys.prefix}")
    folder = grid.make_folder()
    options = {"container": str(image), "workdir": folder.path}
    ident = grid.submit(TWO, sys.executable, "-c", PROGRAM, launcher="openmpi", processes_per_node=1, **options)
    job = grid.wait_for_end(ident)
    assert grid.read_output(ident) == "2 inside True\n" * 2
    assert {component["cluster"] for component in job["components"]} == {"north"}
    assert sorted(path.name for path in Path(folder.path).iterdir()) == ["rank-0", "rank-1"]
    # On one node: a program that fails on one node is ended on the others, perhaps before its output.
    ident = grid.submit(TWO | {"total_size": 1}, "sh", "-c", "read a </image; echo $a $PWD; exit 3", **options)
    assert grid.wait_for_end(ident)["exit_code"] == 3
    assert grid.read_output(ident) == f"inside {folder.path}\n"
    script = Path(folder.path, "job.sh")
    script.write_text(
        "#!/bin/sh\n#KOALA --flexible 2\n#KOALA --ppn 1\n[ ! -e /image ] && mpirun sh -c 'read a </image; echo $a'\n"
    )
    result = grid.run_koala("submit", "--wait", "--container", str(image), "--chdir", folder.path, str(script))
    assert (result.returncode, result.stdout) == (0, "inside\n" * 2), result.stderr
    missing = grid.submit(TWO, "true", container="/tmp/no-such-image")
    assert grid.wait_for_end(missing)["exit_code"] == 127
    assert "there is no container image /tmp/no-such-image on node north-" in grid.read_output(missing)
    refused = grid.run_koala("submit", "--container", str(image), "--fixed", "south:1", "--", "true")
    assert refused.returncode == 2
    assert "cluster south has no container runtime" in refused.stderr
    unclear = grid.run_koala("submit", "--container", "docker://debian", "--flexible", "1", "--", "true")
    assert "download the image to the sites and give its absolute path" in unclear.stderr
