"""The reference of settings lists every setting with its meaning."""

from collections.abc import Iterator

from deploy.documentation.settings_page import page, sections
from koalapy.config.settings import Settings

SECTIONS = sections()


def iterate_schema_settings() -> Iterator[str]:
    """Yield the settings in pydantic's schema, which the page does not use."""
    schema = Settings.model_json_schema()
    sections = {name: definition for name, definition in schema["$defs"].items() if definition["type"] == "object"}
    for section in (schema, *sections.values()):
        for name, schema_property in section["properties"].items():
            if not any(f"#/$defs/{below}'" in str(schema_property) for below in sections):
                yield name


def test_settings_page_lists_every_setting() -> None:
    documented_names = sorted(setting.path.rpartition(".")[2] for section in SECTIONS for setting in section.settings)
    assert len(documented_names) > 100
    assert documented_names == sorted(iterate_schema_settings())


def test_settings_page_gives_meaning_and_type_of_each() -> None:
    assert [
        setting.path for section in SECTIONS for setting in section.settings if not (setting.meaning and setting.kind)
    ] == []


def test_settings_page_shows_bounds_defaults_and_units() -> None:
    lines = page().splitlines()
    for row in (
        "| `claim_grace` | number, at least 0.001 | 10 |",
        "| `bundle_limit` | whole number, at least 0 | 1073741824 (1 GiB) |",
        "| `preemption` | `never`, `claiming`, `placement` | `placement` |",
        "| `token` | text | required |",
        "| `nodes` | whole number, at least 1, at most 254 | 4 |",
    ):
        assert any(line.startswith(row) for line in lines), row
    assert "## `limits.default`, `limits.users.NAME`, `limits.groups.NAME`" in lines
