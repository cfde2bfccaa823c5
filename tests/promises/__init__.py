"""The promises of the README, each kept end to end by one daemon. They belong to ring 1."""
