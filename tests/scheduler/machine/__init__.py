"""The state machine of the scheduler's tests: everybody who does anything to it, each on their own time."""
