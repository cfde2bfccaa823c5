"""The daemon's side of the links to agents."""
