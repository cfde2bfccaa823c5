"""Each policy has a page with an example that is placed as it says, and a picture that is drawn of that."""

import re
from xml.etree import ElementTree

import pytest

from deploy.documentation.pictures import EXAMPLES, FOLDER, GRID, picture, placement, result
from koalapy.policies.registry import DEFAULTS, builtin_policies
from tests.docs.blocks import ROOT
from tests.policies.test_policies_doc import example_grid, parsed, request_of

NAMES = [str(policy["name"]) for policy in builtin_policies().describe_policies()]


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_every_policy_has_a_page_in_the_navigation() -> None:
    assert sorted(EXAMPLES) == NAMES
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"- policies/{name}.md\n" in navigation
        assert f"(policies/{name}.md)" in index


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_placed_as_its_page_says(name: str) -> None:
    example, answer = EXAMPLES[name], placement(name)
    assert f"$ koala submit {example.words} -- ./a.out   # {result(answer)}\n" in page(name)
    assert f"*{answer.reason}*" in page(name)
    given = parsed(example.words.replace(" --input mesh", ""))
    assert (given.policy or DEFAULTS[example.request.type]) == name
    asked = request_of(given)
    sizes = [(c.size, c.cluster) for c in getattr(asked, "components", ())]
    assert asked.type == example.request.type
    assert asked.total_size == example.request.total_size
    assert [(c.size, c.cluster) for c in getattr(example.request, "components", ())] == sizes


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_the_picture_shows(name: str) -> None:
    rows = dict(re.findall(r"^\| (\w+) \| \d+ of \d+ \|.* \| ([^|]+) \|$", page(name), re.MULTILINE))
    components = placement(name).components
    for cluster in GRID:
        there = [f"{c.size} (component {number})" for number, c in enumerate(components) if c.cluster == cluster.name]
        assert rows[cluster.name] == (", ".join(there) or "–")


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_what_is_drawn_today(name: str) -> None:
    drawn = picture(name)
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn, "python -m deploy.documentation.pictures"
    svg = ElementTree.fromstring(drawn)
    marks = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "mark"]
    components = placement(name).components
    assert sorted(marks) == sorted(str(number) for number, one in enumerate(components) for _ in range(one.size))
    assert f"![{svg[0].text}]({name}.svg)" in page(name)


def test_the_grid_is_that_of_the_other_examples() -> None:
    other = example_grid()
    assert [(c.name, c.idle, c.speed) for c in other] == [(c.name, c.idle, c.speed) for c in GRID]
    latencies = {pair: link.latency for pair, link in GRID.links.items()}
    assert {pair: link.latency for pair, link in other.links.items()} == pytest.approx(latencies)
