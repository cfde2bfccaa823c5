"""Choose between two measurements of an ended component: those of its runners, and its resource manager's accounting.

Runners measure the program alone while it runs. The accounting counts the whole job with its runners and waits, but
also nodes of which the runner was killed, and processes that are not descendants of a runner.
"""

from collections.abc import Iterable
from typing import Any

from koalapy.agent.lrm.port import JobUse
from koalapy.model.reports import ProgramUse

MAX_BYTES = 2**53
"""A larger amount of memory is an error of the accounting."""
RUNNER_CPU_S = 10.0
"""Processor seconds on a node that the accounting may count beyond the program: the runner and the job's script."""
RUNNER_CPU_SHARE = 0.05
"""The same relative to the program's processor time, since a runner works for as long as the program writes."""


def sum_usages(usages: Iterable[dict[str, Any]]) -> ProgramUse | None:
    """Return the use of all nodes with a report of their runner; None without any."""
    reported = list(usages)
    if not reported:
        return None
    return ProgramUse(
        nodes=len(reported),
        cpu_time=sum(usage["cpu"] for usage in reported),
        cpu_available=sum(usage["processors"] * usage["seconds"] for usage in reported),
        peak_memory=max(usage["memory"] for usage in reported),
    )


def select_use(measured: ProgramUse | None, accounted: JobUse | None, nodes: int) -> ProgramUse | None:
    """Return the accounting of a component's job if it covers more than the measurement by runners, else the latter.

    It covers more if it counts more nodes, or more processor time than the program and its runners used. The peak
    memory is the largest of both. ``nodes``: nodes of the component. Return None if neither is known.
    """
    if accounted is None or (measured is None and accounted.cpu_available is None):
        return measured
    counted = min(nodes, accounted.nodes or (measured.nodes if measured is not None else nodes))
    if measured is not None:
        explained = measured.cpu_time * (1 + RUNNER_CPU_SHARE) + RUNNER_CPU_S * counted
        counts_more_nodes = counted > measured.nodes and accounted.cpu_time >= measured.cpu_time
        if counted < measured.nodes or not (counts_more_nodes or accounted.cpu_time > explained):
            return measured
    available = accounted.cpu_available if measured is None else accounted.cpu_available or measured.cpu_available
    reported_peaks = (accounted.peak_memory, measured.peak_memory if measured is not None else None)
    peaks = [peak for peak in reported_peaks if peak is not None and peak <= MAX_BYTES]
    return ProgramUse(
        nodes=counted,
        cpu_time=accounted.cpu_time,
        cpu_available=available or 0.0,
        peak_memory=max(peaks, default=None),
        accounted=True,
    )
