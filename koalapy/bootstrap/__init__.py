"""Choose the adapters and put the processes together."""
