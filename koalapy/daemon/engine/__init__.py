"""The scheduler's process: one queue of events, its writes, its outbox and its duties."""
