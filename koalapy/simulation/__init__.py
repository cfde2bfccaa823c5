"""The simulated world: virtual clusters, users and time around the scheduler of production. No rule is copied here."""
