"""What MkDocs is told beside ``mkdocs.yml``: pages that are made of the code, and links out of ``docs/``."""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from deploy.documentation import evidence_page, rest_page, settings_page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
OPENAPI = "openapi.json"
"""Beside the page of the API, what it is made of."""
LANGUAGES = {".yaml": "yaml", ".service": "ini", ".conf": "ini"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A folder in the navigation, as ``adr/``, stands for its pages."""
    config.nav = [_with_folders(entry, Path(config.docs_dir)) for entry in config.nav or ()]
    return config


def _with_folders(entry: Any, docs: Path) -> Any:
    if isinstance(entry, dict):
        return {title: _with_folders(below, docs) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_with_folders(one, docs) for one in entry]
    if not entry.endswith("/"):
        return entry
    pages = sorted(path for path in (docs / entry).glob("**/*.md"))
    title = (docs / entry / "README.md", docs / entry / "index.md")
    named = next((_title(path) for path in title if path.exists()), "Decisions")
    return {named: [path.relative_to(docs).as_posix() for path in sorted(pages, key=lambda path: path not in title)]}


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Files elsewhere in the repository that a page links to, as pages of their own beside the navigation."""
    for path in sorted({target for file in files.documentation_pages() for target in _outside(file)}):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix != ".md":
            text = (
                f"---\nsearch: {{boost: 0.5}}\n---\n# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
            )
        page = File.generated(config, _page_of(path), content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    files.append(File.generated(config, OPENAPI, content=json.dumps(rest_page.document(), indent=1)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of ``docs/`` lead to the pages of these files; one to a folder there is none any more."""
    source = page.file.src_uri
    if source == "settings.md":
        markdown += settings_page.page()
    elif source == "security-evidence.md":
        markdown += evidence_page.page()
    elif source == "rest.md":
        markdown += rest_page.page(json.loads(files.src_uris[OPENAPI].content_string))

    def leading(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        path = _in_repository(source, link)
        if (ROOT / path).is_dir():
            return words
        if path.is_relative_to("docs") and not source.startswith("repository/"):
            return match[0]
        target = str(path.relative_to("docs")) if path.is_relative_to("docs") else _page_of(path)
        return f"[{words}]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(leading, markdown)


def _outside(file: File) -> Iterator[Path]:
    """The files elsewhere that a page links to."""
    for _, link, _ in LINK.findall(file.content_string):
        path = _in_repository(file.src_uri, link)
        if not path.is_relative_to("docs") and (ROOT / path).is_file():
            yield path


def _in_repository(page: str, link: str) -> Path:
    """Where a link of a page leads, from the root of the repository on."""
    page = page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"
    return Path(posixpath.normpath(posixpath.join(posixpath.dirname(page), link)))


def _page_of(path: Path) -> str:
    return f"repository/{path}" if path.suffix == ".md" else f"repository/{path}.md"
