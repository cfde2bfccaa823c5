"""Helpers for the operating system. Every process uses them; nothing else of koalapy is imported here."""
