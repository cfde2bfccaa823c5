"""A YAML mapping with the same key twice is refused, with its lines; everything else is read as PyYAML reads it."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from koalapy.config.strict_yaml import AliasFound, DuplicateKey, load_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is given twice, in lines 1 and 3: leave one out"),
        ('x:\n  a: {b: 1, "b": 2}\n', "the key 'b' is given twice, in line 2: leave one out"),
        ('{"a": 1, "a": 1}', "the key 'a' is given twice, in line 1: leave one out"),
        ("- 1\n- {2: x, 2: y}\n", "the key '2' is given twice, in line 2: leave one out"),
    ],
)
def test_load_yaml_with_duplicate_key_names_key_and_lines(text: str, message: str) -> None:
    with pytest.raises(DuplicateKey) as refusal:
        load_yaml(text)
    assert str(refusal.value) == message


def test_load_yaml_with_merged_mapping_lets_own_keys_override() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\nd: {x: 5}\n"
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml(text)["c"] == {"x": 3, "y": 4}
    with pytest.raises(AliasFound):
        load_yaml(text, aliases=False)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii", exclude_categories=["C"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab <*&:1", max_size=3), inner),
)


@given(values)
def test_load_yaml_of_any_value_returns_it(value: Any) -> None:
    assert load_yaml(yaml.safe_dump(value)) == value
