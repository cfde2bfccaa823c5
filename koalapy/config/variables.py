"""Environment variables with the prefix ``KOALA_`` that are no settings."""

from koalapy.model.job_spec import SET_BY_RUNNERS

OF_COMMANDS = (
    "AGENT_DIRECTORY",
    "AGENT_TOKEN",
    "CA_FILE",
    "CONFIG",
    "DATA_DIR",
    "LOGIN_SOCKET",
    "RESULTS",
    "SERVE_HOST",
    "TOKEN",
    "TRACES",
    "URL",
)
"""Variables, without ``KOALA_``, that commands and units read and that are no settings."""
OF_JOBS = (*SET_BY_RUNNERS, "SCRATCH")
"""Variables, without ``KOALA_``, that programs of jobs and their child processes inherit."""
