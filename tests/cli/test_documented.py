"""Every command and option has a help text."""

import click
import pytest

from deploy.documentation.cli_page import COMMON_OPTIONS, commands, page


@pytest.mark.parametrize("path", sorted(commands()))
def test_command_has_help_for_itself_and_each_option(path: str) -> None:
    command = commands()[path]
    assert command.help
    context = click.Context(command)
    help_texts = {p.name: (p.get_help_record(context) or ("", "hidden"))[1] for p in command.params}
    assert [name for name, text in help_texts.items() if not text] == []


def test_cli_page_lists_every_command_and_option() -> None:
    text = page()
    for path, command in commands().items():
        if path == "koala":
            continue
        assert f"\n### {path}\n" in text
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        assert {p.opts[0] for p in options if p.opts[0] not in text} <= COMMON_OPTIONS


def test_cli_page_shows_no_range_for_unbounded_options() -> None:
    assert "<=None" not in page()
    assert "[default: 200; 1<=x<=2000]" in page()
