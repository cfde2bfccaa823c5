"""Commands that store, fetch and copy files."""
