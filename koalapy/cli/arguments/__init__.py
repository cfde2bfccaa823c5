"""Command lines: what a function's signature declares, words are read by, and help pages and completion tell."""

from koalapy.cli.arguments.declare import Argument, Command, Group, Lazy, Option

__all__ = ["Argument", "Command", "Group", "Lazy", "Option"]
