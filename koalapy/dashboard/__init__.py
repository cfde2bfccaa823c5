"""The operators' dashboard: pages that the daemon serves, each made of what the services tell at that moment."""
