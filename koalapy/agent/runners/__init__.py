"""The agent's side of the links to runners."""
