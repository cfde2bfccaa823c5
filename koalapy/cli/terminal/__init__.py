"""Output on a terminal: tables, charts, live views, progress."""
