"""Each policy has a page with an example, its placement and a picture."""

import re
from xml.etree import ElementTree

import pytest

from deploy.documentation.pictures import EXAMPLES, FOLDER, GRID, picture, placement, result
from koalapy.policies.registry import DEFAULTS, builtin_policies
from tests.docs.blocks import ROOT
from tests.policies.test_policies_doc import example_grid, parse_options, request_of

NAMES = [str(policy["name"]) for policy in builtin_policies().describe_policies()]


def read_page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_navigation_and_index_have_every_policy() -> None:
    assert sorted(EXAMPLES) == NAMES
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"- policies/{name}.md\n" in navigation
        assert f"(policies/{name}.md)" in index


@pytest.mark.parametrize("name", NAMES)
def test_example_of_page_is_placed_as_shown(name: str) -> None:
    example, answer = EXAMPLES[name], placement(name)
    assert f"$ koala submit {example.arguments} -- ./a.out   # {result(answer)}\n" in read_page(name)
    assert f"*{answer.reason}*" in read_page(name)
    options = parse_options(example.arguments.replace(" --input mesh", ""))
    assert (options.policy or DEFAULTS[example.request.type]) == name
    request = request_of(options)
    sizes = [(c.size, c.cluster) for c in getattr(request, "components", ())]
    assert request.type == example.request.type
    assert request.total_size == example.request.total_size
    assert [(c.size, c.cluster) for c in getattr(example.request, "components", ())] == sizes


@pytest.mark.parametrize("name", NAMES)
def test_table_of_page_shows_the_placement(name: str) -> None:
    rows = dict(re.findall(r"^\| (\w+) \| \d+ of \d+ \|.* \| ([^|]+) \|$", read_page(name), re.MULTILINE))
    components = placement(name).components
    for cluster in GRID:
        sizes = [f"{c.size} (component {number})" for number, c in enumerate(components) if c.cluster == cluster.name]
        assert rows[cluster.name] == (", ".join(sizes) or "–")


@pytest.mark.parametrize("name", NAMES)
def test_picture_of_page_is_up_to_date(name: str) -> None:
    drawn = picture(name)
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn, "python -m deploy.documentation.pictures"
    svg = ElementTree.fromstring(drawn)
    marks = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "mark"]
    components = placement(name).components
    assert sorted(marks) == sorted(
        str(number) for number, component in enumerate(components) for _ in range(component.size)
    )
    assert f"![{svg[0].text}]({name}.svg)" in read_page(name)


def test_grid_of_pages_equals_that_of_examples() -> None:
    grid = example_grid()
    assert [(c.name, c.idle, c.speed) for c in grid] == [(c.name, c.idle, c.speed) for c in GRID]
    latencies = {pair: link.latency for pair, link in GRID.links.items()}
    assert {pair: link.latency for pair, link in grid.links.items()} == pytest.approx(latencies)
