"""Build the library of ``interpose.c``, and control it in the processes of one grid by files."""

import atexit
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("interpose.c")


@dataclass(frozen=True, order=True)
class Point:
    """A side effect in the code: a kind of process, an effect on an object, and the line of koalapy that causes it."""

    process: str
    effect: str
    object: str
    place: str

    def __str__(self) -> str:
        return f"{self.process} {self.effect} {self.object} {self.place}"


def parse_point(text: str) -> Point:
    """Return the point of a line. Raise ``ValueError`` unless it has four words."""
    process, effect, target, place = text.split()
    return Point(process, effect, target, place)


@dataclass(frozen=True)
class Crash:
    """The process that reaches a point for the ``count``-th time is killed before or after the effect."""

    point: Point
    moment: str
    count: int

    def __str__(self) -> str:
        return f"{self.point} {self.moment} {self.count}"


@cache
def build_library() -> Path:
    """Compile the library once, for all runs of this process. Raise ``RuntimeError`` if that fails."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler: apt-get install gcc libc6-dev")
    folder = tempfile.mkdtemp(prefix="koala-interpose-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "interpose.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-w", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{SOURCE} does not compile: {done.stderr[:2000]}")
    return library


class Interposer:
    """The control folder of a grid's processes."""

    def __init__(self, folder: Path, root: Path, crash: Crash | None = None, *, record_writes: bool = False) -> None:
        """Watch the files below ``root``; ``record_writes``: record each change of them, with its content."""
        self._library, self._folder = build_library(), folder
        folder.mkdir()
        (folder / "root").write_text(str(root))
        (folder / "counter").write_bytes(bytes(8))
        (folder / "plan").write_text(str(crash) if crash else "")
        for name in ("points", "crashed", "lock", *(["writes"] if record_writes else [])):
            (folder / name).touch()

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CRASH_CONTROL": str(self._folder)}

    @property
    def writes(self) -> Path:
        return self._folder / "writes"

    def count_points(self) -> Counter[Point]:
        """Return how often each point was reached."""
        return Counter(map(parse_point, (self._folder / "points").read_text().splitlines()))

    def has_crashed(self) -> bool:
        return (self._folder / "crashed").stat().st_size > 0

    def start_new_boot(self, identity: str) -> None:
        """Let processes that start from now on take the machine for restarted."""
        file = self._folder / "boot-id"
        file.write_text(f"{identity}\n")
        (self._folder / "boot").write_text(str(file))
