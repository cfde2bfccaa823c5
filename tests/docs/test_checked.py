"""The checks of the documentation find wrong commands and output."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.session import TIME, find_missing_lines

PAGE = """
```console
$ koala submit --flexible 2 \\
    -- true
Submitted job 1
$ cat >x <<'END'
$ not a command
END
$ python -c 'if True:
>     print(1)'
1
```

- a list
    <!-- not played: it would take too long here -->
    ```console
    $ make test
    ```

```yaml
a: b
```
"""


def test_blocks_of_page_are_parsed_with_commands_and_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    first, second, third = blocks(tmp_path / "page.md")
    assert [(command.text, command.output_lines) for command in first.commands()] == [
        ("koala submit --flexible 2 \\\n    -- true", ("Submitted job 1",)),
        ("cat >x <<'END'\n$ not a command\nEND", ()),
        ("python -c 'if True:\n    print(1)'", ("1",)),
    ]
    assert (first.mark, second.mark) == (None, ("not played", "it would take too long here"))
    assert [command.text for command in second.commands()] == ["make test"]
    assert third.language == "yaml"


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("north  local  usable  4", "north local   usable 2"),
        ("SHA-256 3d9347fe11a5", "SHA-256 99999999aaaa"),
        ("job 3 of ada", "job 17 of root"),
        ("koala cancel 3 && koala submit …", "koala cancel 9 && koala submit --flexible 4"),
        ("200 MB in 2.41 s", "15 KB in 0.2 s"),
    ],
)
def test_varying_numbers_are_not_compared(expected: str, output: str) -> None:
    assert find_missing_lines([expected], f"before\n{output}\nafter") == []


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ("north  local  usable  4", "north local drained 4"),
        ("job 3 succeeded", "job 3 succeeded at last"),
        ("one", ""),
        ("koala cancel … submit", "koala cancel 9"),
    ],
)
def test_missing_output_line_is_found(expected: str, output: str) -> None:
    assert find_missing_lines([expected], output) == [expected]


def test_node_counts_are_compared_when_only_times_vary() -> None:
    expected = "south  local  usable  4  2  0  2  since 16:17 UTC"
    assert find_missing_lines([expected], "south local usable 4 4 0 0 since 16:17 UTC", TIME) == [expected]
    assert find_missing_lines([expected], "south local usable 4 2 0 2 since 9:05 UTC", TIME) == []


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md"])
def test_links_of_pages_outside_the_site_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []
