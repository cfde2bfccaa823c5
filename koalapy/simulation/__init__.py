"""A virtual grid, clock and network around the production scheduler."""
