"""Reproduce Figure 9 of lerida-2008 at small scale: compare predicted and measured slowdowns on slow links.

``python -m tests.experiments.lerida_2008_live`` runs it on the testbed (``make testbed``) and writes
``experiments/published/live/lerida-2008-fig-9.json`` and the page next to it; ``--page`` writes only the page.

A token bucket (tbf) limits the outgoing traffic of each node to the other cluster. A program that sends equal parts to
all nodes loads all buckets of a cluster equally, so that they act as one uplink with the sum of their rates.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from koalapy.policies.matching import Kind, Matching, Problem, Share, Site
from koalapy.workload.tables import markdown_table

PAGE = Path(__file__).parents[2] / "experiments" / "published" / "live" / "lerida-2008-fig-9.md"
PROGRAM = Path(__file__).parent / "paced_exchange.py"
RATE = 8_000_000 / 8
"""Bytes per second from a limited node to the other cluster."""
STEPS, COMPUTING, COMMUNICATING = 6, 0.25, 1.0
"""Steps of the program, and seconds per step for each phase on fast links."""
PLACEMENTS = ({"north": 2, "south": 2}, {"north": 3, "south": 2}, {"north": 3, "east": 3})
NEEDS = (0.5, 1.5, 3.0)
"""PNBW as multiples of ``RATE``."""


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements of one placement with one bandwidth need; slowdowns are relative to the program's own pace."""

    placement: dict[str, int]
    bandwidth: float
    """PNBW in bytes per second."""
    exchange: list[float]
    """Measured slowdown of the exchange (SC) on limited links, for each run."""
    whole: list[float]
    """Measured slowdown of the whole run (T) on limited links, for each run."""
    free: list[float]
    """Measured slowdown of the exchange on unlimited links, for each run."""


def foretold(placement: dict[str, int], bandwidth: float, rate: float = RATE) -> Matching:
    """Return the slowdowns that matching predicts for exactly this placement."""
    share = COMMUNICATING / (COMPUTING + COMMUNICATING)
    sites = tuple(Site(name, (Kind("", 1.0, nodes),), nodes * rate) for name, nodes in placement.items())
    problem = Problem(sum(placement.values()), sites, 1 - share, share, bandwidth)
    return problem.evaluate_shares(Share(name, "", nodes) for name, nodes in placement.items())


def measured(told: dict[str, float]) -> tuple[float, float]:
    """Return the slowdowns of the exchange and of the whole run from the program's output."""
    return told["exchanging"] / (STEPS * COMMUNICATING), told["lasted"] / (STEPS * (COMPUTING + COMMUNICATING))


def told_by(output: str) -> dict[str, float]:
    """Parse the JSON line of the program's output; raise ``ValueError`` if there is none."""
    for line in output.splitlines():
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    raise ValueError(f"the program said {output!r}")


def run(rounds: int) -> Iterator[Point]:
    """Measure each placement on the testbed, alternating between limited and unlimited links."""
    from tests.grid.slow_links import limited_link
    from tests.grid.testbed import Testbed

    grid = Testbed().start()

    def slowdowns(placement: dict[str, int], bandwidth: float) -> tuple[float, float]:
        parts = [{"cluster": name, "size": nodes} for name, nodes in placement.items()]
        words = [str(each) for each in (STEPS, COMPUTING, COMMUNICATING, bandwidth)]
        program = PROGRAM.read_text(encoding="utf-8")
        ident = grid.submit(
            {"type": "fixed", "components": parts}, "python", "-c", program, *words, launcher="openmpi", walltime=300
        )
        job = grid.wait_for_end(ident, 300)
        assert job["state"] == "succeeded", (job["reason"], grid.read_output(ident)[-1000:])
        return measured(told_by(grid.read_output(ident)))

    for placement in PLACEMENTS:
        one, other = placement
        for need in NEEDS:
            held: list[tuple[float, float]] = []
            free: list[float] = []
            for _ in range(rounds):
                with limited_link(grid, one, other, f"{RATE * 8:.0f}bit"):
                    held.append(slowdowns(placement, need * RATE))
                free.append(slowdowns(placement, need * RATE)[0])
            yield Point(placement, need * RATE, [e for e, _ in held], [w for _, w in held], free)
    grid.wait_until_idle()
    grid.close()


def page(points: Sequence[Point], load: float, processors: int) -> str:
    """Return the page in Markdown."""
    rows = []
    for point in points:
        matching = foretold(point.placement, point.bandwidth)
        rows.append(
            [
                " + ".join(f"{nodes} {name}" for name, nodes in point.placement.items()),
                f"{point.bandwidth / 1e6:g}",
                f"{matching.communication:.2f}",
                _middle(point.exchange),
                f"{matching.time:.2f}",
                _middle(point.whole),
                _middle(point.free),
            ]
        )
    head = ["placement", "PNBW, MB/s", "SC foretold", "SC measured", "T foretold", "T measured", "SC, links free"]
    rounds = len(points[0].exchange)
    return f"""# lerida-2008, Figure 9, live

<!-- written by python -m tests.experiments.lerida_2008_live -->

What matching foretells of a job on slow links, beside real runs: one Open MPI job over two clusters of the testbed, one
rank on each node. In each of {STEPS} steps a rank computes for {COMPUTING:g} s and exchanges equal parts with all
others, paced to send PNBW bytes per second for {COMMUNICATING:g} s if the network takes as much. Each node's way to the
other cluster is held to {RATE / 1e6:g} MB/s by a token bucket (tbf), so that k nodes have an uplink of k times that.
*Foretold* is what [resource matching](../../../docs/policies.md) says of exactly that placement, PNBW and capacity.

<!-- not played: it takes the testbed and some minutes -->
```console
$ python -m tests.experiments.lerida_2008_live
```

SC is the slowdown of the exchange, T that of the whole run, both against the program's own pace: the median of {rounds}
runs, and the least and the most. Runs on held and on free links took turns. Load of the machine meanwhile: {load:.1f}
on {processors} processors.

{markdown_table(head, rows)}

The estimate is right about where links begin to be too narrow, and about the order of placements but for the widest
need, where both placements with south take equally long. Beyond saturation exchanges take {_beyond(points)} times as
long as foretold; it leaves out the bytes around each message and the waiting for the last of all parts, but whether
that is why was not looked into.

The paper's figure has NAS programs on two clusters of workstations, and no numbers in its text; it says that estimated
and real times have a similar shape, and that the estimate can be corrected. Local activity on processors, its other
variable, is not shown here: all nodes of a testbed share those of one machine, and computing is a pause.
"""


def _beyond(points: Sequence[Point]) -> str:
    """Return the range of measured over predicted exchange times where links were too narrow."""
    ratios = []
    for point in points:
        expected = foretold(point.placement, point.bandwidth).communication
        if expected > 1:
            ratios.append(median(point.exchange) / expected)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} – {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    given = parser.parse_args()
    results = PAGE.with_suffix(".json")
    if not given.page:
        points = []
        for point in run(given.rounds):
            print(point, flush=True)
            points.append(point)
        found: dict[str, Any] = {"load": round(os.getloadavg()[2], 1), "processors": os.cpu_count()}
        found["points"] = [asdict(each) for each in points]
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(results.read_text(encoding="utf-8"))
    text = page([Point(**each) for each in kept["points"]], kept["load"], kept["processors"])
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
