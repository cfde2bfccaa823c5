"""The durations of an agent that tests of real processes shorten."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTimeouts:
    """All values are in seconds."""

    # Resource manager
    lrm_silence_s: float = 10.0
    """Duration of a poll after which the daemon is told that the resource manager does not answer."""
    report_interval_s: float = 10.0
    """Time between two reports of an unchanged cluster."""
    submit_pause_s: float = 0.2
    """Base of the pauses between two tries to submit a job: each pause is twice as long as the one before."""
    runner_connect_s: float = 60.0
    """Time that runners have to connect once the resource manager says that they run."""
    expiry_check_s: float = 3600.0
    """Time between two searches for what is left of daemons that are not heard of any more."""

    # Files
    transfer_retry_s: float = 0.5
    """First pause after a transfer was cut; each further pause is twice as long."""
    max_transfer_retry_s: float = 16.0
    """Longest pause between two tries of a transfer."""
    transfer_login_s: float = 30.0
    """Time that a puller has to begin, to show its ticket, and to be let in."""
    account_stall_s: float = 30.0
    """Time without a byte after which a process that handles files as another account counts as stuck."""
    sweep_interval_s: float = 60.0
    """Time between two searches for folders of killed runners."""

    # Check of a head node
    trial_node_s: float = 30.0
    """Time that a node may take to become free and to run the trial job."""
    trial_output_s: float = 3.0
    """Time after the trial job's end in which its output may come through a shared file system."""
    trial_poll_s: float = 0.5
    """Pause between two looks at the trial job."""


DEFAULT_TIMEOUTS = AgentTimeouts()
