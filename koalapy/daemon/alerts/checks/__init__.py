"""What may be wrong, by what it is about: each check only looks."""
