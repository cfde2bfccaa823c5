"""What holds the documentation would find what is wrong with it."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.session import TIME, missing

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


def test_a_page_is_read_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    first, second, third = blocks(tmp_path / "page.md")
    assert [(command.text, command.told) for command in first.commands()] == [
        ("koala submit --flexible 2 \\\n    -- true", ("Submitted job 1",)),
        ("cat >x <<'END'\n$ not a command\nEND", ()),
        ("python -c 'if True:\n    print(1)'", ("1",)),
    ]
    assert (first.mark, second.mark) == (None, ("not played", "it would take too long here"))
    assert [command.text for command in second.commands()] == ["make test"]
    assert third.language == "yaml"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("north  local  usable  4", "north local   usable 2"),
        ("SHA-256 3d9347fe11a5", "SHA-256 99999999aaaa"),
        ("job 3 of ada", "job 17 of root"),
        ("koala cancel 3 && koala submit …", "koala cancel 9 && koala submit --flexible 4"),
        ("200 MB in 2.41 s", "15 KB in 0.2 s"),
        ("├── a chart ─", "nothing of the kind"),
    ],
)
def test_what_differs_from_one_time_to_the_next_is_no_lie(told: str, said: str) -> None:
    assert missing([told], f"before\n{said}\nafter") == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("north  local  usable  4", "north local drained 4"),
        ("job 3 succeeded", "job 3 succeeded at last"),
        ("one", ""),
        ("koala cancel … submit", "koala cancel 9"),
    ],
)
def test_what_is_not_said_is_found(told: str, said: str) -> None:
    assert missing([told], said) == [told]


def test_nodes_are_counted_where_the_next_step_hangs_on_them() -> None:
    told = "south  local  usable  4  2  0  2  since 16:17 UTC"
    assert missing([told], "south local usable 4 4 0 0 since 16:17 UTC", TIME) == [told]
    assert missing([told], "south local usable 4 2 0 2 since 9:05 UTC", TIME) == []


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md"])
def test_pages_beside_the_site_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []
