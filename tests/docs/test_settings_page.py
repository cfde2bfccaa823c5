"""No setting is missing on the page that is made of them, and each says what it means."""

from collections.abc import Iterator

from deploy.documentation.settings_page import page, sections
from koalapy.config.settings import Settings

SECTIONS = sections()


def known() -> Iterator[str]:
    """Each setting by what pydantic knows of the sections, which the page does not go by."""
    schema = Settings.model_json_schema()
    sections = {name: one for name, one in schema["$defs"].items() if one["type"] == "object"}
    for section in (schema, *sections.values()):
        for name, told in section["properties"].items():
            if not any(f"#/$defs/{below}'" in str(told) for below in sections):
                yield name


def test_no_setting_is_missing() -> None:
    told = sorted(one.path.rpartition(".")[2] for section in SECTIONS for one in section.settings)
    assert len(told) > 100
    assert told == sorted(known())


def test_each_says_what_it_means_and_what_it_may_be() -> None:
    assert [one.path for section in SECTIONS for one in section.settings if not (one.meaning and one.kind)] == []


def test_it_tells_bounds_defaults_and_units() -> None:
    lines = page().splitlines()
    for told in (
        "| `claim_grace` | number, at least 0.001 | 10 |",
        "| `bundle_limit` | whole number, at least 0 | 1073741824 (1 GiB) |",
        "| `preemption` | `never`, `claiming`, `placement` | `placement` |",
        "| `token` | text | required |",
        "| `nodes` | whole number, at least 1, at most 254 | 4 |",
    ):
        assert any(line.startswith(told) for line in lines), told
    assert "## `limits.default`, `limits.users.NAME`, `limits.groups.NAME`" in lines
