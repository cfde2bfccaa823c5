"""The agent's process: its loop, its link to daemons, its spool and its settings."""
