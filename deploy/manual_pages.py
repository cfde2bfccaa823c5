"""Add the manual pages to the wheel, made of the help texts of its own commands."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "share/man/man1"


class ManualPages(BuildHookInterface[Any]):
    """Writes the pages before the wheel is built, and removes them after it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the pages. Leave them out of editable installations, in which they would grow old."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        sys.dont_write_bytecode = True
        from koalapy import __version__
        from koalapy.cli.main import KOALA
        from koalapy.cli.terminal.manual import format_pages

        self._folder = TemporaryDirectory()
        for name, page in format_pages("koala", KOALA, __version__).items():
            path = Path(self._folder.name, name)
            path.write_text(page, encoding="utf-8")
            build_data["shared_data"][str(path)] = f"{FOLDER}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the written pages."""
        if version != "editable":
            self._folder.cleanup()
