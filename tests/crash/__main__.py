"""Interrupt the side effects of koalapy's processes one by one, and check that nothing is lost or done twice."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.crash.disk import Loss
from tests.crash.interposer import Crash, parse_point
from tests.crash.plans import choose_crashes
from tests.crash.power_loss import cut_power, record, remove_recording
from tests.crash.runs import interrupt, record_points, temporary_folder


def interrupt_all(results: Path, workers: int, prefix: str = "") -> int:
    """Interrupt all points with a prefix that ``results`` does not contain yet. Return 1 after a violation, else 0."""
    done = {line.split(" | ")[0] for line in results.read_text().splitlines()} if results.exists() else set()
    crashes = [
        crash for crash in choose_crashes(record_points()) if str(crash) not in done and str(crash).startswith(prefix)
    ]
    failed = 0
    with ThreadPoolExecutor(workers) as pool, results.open("a") as file:
        for future in as_completed({pool.submit(_try_interrupt, crash) for crash in crashes}):
            line, is_bad = future.result()
            failed += is_bad
            file.write(f"{line}\n")
            file.flush()
    print(f"{len(crashes)} crashes, {failed} with violations; see {results}")
    return 1 if failed else 0


def _try_interrupt(crash: Crash) -> tuple[str, bool]:
    """Return the result of a crash as a line, and whether it has violations."""
    try:
        outcome = interrupt(crash, keep=True)
    except Exception as error:  # noqa: BLE001 - an aborted run is a finding
        return f"{crash} | aborted | {error!r}"[:1000], True
    reached = "interrupted" if outcome.has_crashed else "not reached"
    text = "; ".join(map(str, outcome.violations)).replace("\n", " ")[:1000]
    return f"{crash} | {reached} | {outcome.seconds:.0f} s | {text}", bool(outcome.violations)


def cut_power_often(count: int, seed: int) -> int:
    """Cut the power of one run ``count`` times; print each result. Return 1 after a violation, else 0."""
    failed = 0
    with temporary_folder() as folder:
        recording = record(folder)
        for cut in recording.choose_cuts(count, (Loss.STRICT, Loss.TORN, Loss.CONTENT), seed):
            violations = cut_power(recording, cut, keep=True)
            failed += bool(violations)
            print(f"{cut} of {len(recording.changes)} | {'; '.join(map(str, violations))}"[:1000], flush=True)
        remove_recording(recording)
    print(f"{count} losses of power of seed {seed}, {failed} with violations")
    return 1 if failed else 0


def main() -> int:
    """Return 0 without a violation, 1 with one."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print all points with their counts")
    parser.add_argument("--point", help="the point to interrupt, as --list prints it")
    parser.add_argument("--moment", choices=("before", "after"), default="before")
    parser.add_argument("--time", type=int, default=1, help="at which time (the first is 1)")
    parser.add_argument("--all", metavar="FILE", type=Path, help="interrupt all points; append each result to FILE")
    parser.add_argument("--only", default="", help="with --all: only points whose text begins with this")
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time with --all")
    parser.add_argument("--power-loss", metavar="N", type=int, help="cut the power of a run N times")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of --power-loss")
    options = parser.parse_args()
    if options.power_loss:
        return cut_power_often(options.power_loss, options.seed)
    if options.all:
        return interrupt_all(options.all, options.workers, options.only)
    if options.list:
        for point, count in sorted(record_points().items()):
            print(f"{count:6} {point}")
        return 0
    crash = Crash(parse_point(options.point), options.moment, options.time)
    outcome = interrupt(crash, keep=True)
    print(f"{crash}: {'interrupted' if outcome.has_crashed else 'not reached'}, {len(outcome.violations)} violations")
    for violation in outcome.violations:
        print(f"  {violation}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
