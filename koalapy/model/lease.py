"""The lease of a component: for how long it goes on while its daemon is silent, and when it is certainly over.

Its runner counts the silence and ends the program when the lease is over; the daemon counts from no earlier a moment,
and for longer, before it starts the next attempt (docs/adr/0030-component-leases.md).
"""

DEFAULT_LEASE = 2400.0
"""Seconds; HTCondor's JobLeaseDuration."""
NO_LEASE = 0.0
"""The lease of a job that is not ended by silence."""
CLOCK_RATE_MARGIN = 0.01
"""By which fraction the clocks of a daemon and a node may differ in rate: slewed clocks differ by 0.1 % at most."""
END_MARGIN = 30.0
"""Seconds that runner, agent and resource manager have to end the processes, once lease and grace are over."""
WALLTIME_ALLOWANCE = 60.0
"""Seconds beyond the walltime after which runner and resource manager end a program that the daemon has not ended."""


def lease_of(job: float | None, cluster: float | None) -> float | None:
    """Return the lease of a job's component on a cluster in seconds, None where silence does not end it.

    The job's own lease comes before the cluster's, and that before the default.
    """
    lease = next((lease for lease in (job, cluster) if lease is not None), DEFAULT_LEASE)
    return None if lease == NO_LEASE else lease


def with_margin(seconds: float) -> float:
    """Return after how many seconds of the daemon's clock a node has counted so many, and its processes are ended."""
    return seconds * (1 + CLOCK_RATE_MARGIN) + END_MARGIN
