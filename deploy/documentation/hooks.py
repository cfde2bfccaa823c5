"""Hooks of MkDocs: pages generated from the code, the experiments' published pages, and links out of `docs/`."""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from deploy.documentation import (
    cli_page,
    evidence_page,
    logs_page,
    metrics_page,
    notebook_page,
    python_page,
    rest_page,
    settings_page,
)
from koalapy.cli.terminal import foreign_options

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
OPENAPI = "openapi.json"
"""Path of the OpenAPI document in the site."""
EXPERIMENTS = Path("experiments/published")
"""Pages outside `docs/` that belong to the site, by the same path."""
LANGUAGES = {".yaml": "yaml", ".service": "ini", ".conf": "ini"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace folders of the navigation, such as `adr/`, by their pages."""
    config.nav = [_expand_folders(entry, Path(config.docs_dir)) for entry in config.nav or ()]
    return config


def _expand_folders(entry: Any, docs: Path) -> Any:
    if isinstance(entry, dict):
        return {title: _expand_folders(below, docs) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_expand_folders(inner, docs) for inner in entry]
    if not entry.endswith("/"):
        return entry
    base = ROOT if Path(entry) == EXPERIMENTS else docs
    index_pages = (base / entry / "README.md", base / entry / "index.md")
    title = next((_title(path) for path in index_pages if path.exists()), "Decisions")
    pages = sorted((base / entry).glob("**/*.md"), key=lambda path: (path not in index_pages, path))
    return {title: [path.relative_to(base).as_posix() for path in pages]}


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the experiments' pages, and a page outside the navigation for each other file that a page links to."""
    for path in sorted((ROOT / EXPERIMENTS).rglob("*")):
        if path.suffix in (".md", ".svg", ".png"):
            source = path.relative_to(ROOT).as_posix()
            files.append(File(source, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted({target for file in files.documentation_pages() for target in _outside(file)}):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix != ".md":
            text = (
                f"---\nsearch: {{boost: 0.5}}\n---\n# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
            )
        page = File.generated(config, _page_of(path), content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    for path in sorted(Path(config.docs_dir).glob("*.ipynb")):
        files.append(File.generated(config, f"{path.stem}.md", content=notebook_page.page(path)))
    files.append(File.generated(config, OPENAPI, content=json.dumps(rest_page.document(), indent=1)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add generated text to its page, and make links out of `docs/` lead to the pages of these files.

    Links to folders become plain text.
    """
    source = page.file.src_uri
    if source == "settings.md":
        markdown += settings_page.page()
    elif source == "cli.md":
        markdown += cli_page.page()
    elif source == "coming-from-slurm.md":
        markdown += "\n" + foreign_options.format_options_page(cli_page.commands())
    elif source == "security-evidence.md":
        markdown += evidence_page.page()
    elif source == "logs.md":
        markdown += logs_page.page()
    elif source == "metrics.md":
        markdown += metrics_page.page()
    elif source == "python.md":
        markdown += python_page.page()
    elif source == "rest.md":
        markdown += rest_page.page(json.loads(files.src_uris[OPENAPI].content_string))

    def resolve_link(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        path = _in_repository(source, link)
        if (ROOT / path).is_dir():
            return text
        if path.is_relative_to("docs"):
            target = str(path.relative_to("docs"))
            if path.suffix == ".ipynb" and source != path.with_suffix(".md").name:
                target = str(Path(target).with_suffix(".md"))
        else:
            target = str(path) if path.is_relative_to(EXPERIMENTS) else _page_of(path)
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(resolve_link, markdown)


def _outside(file: File) -> Iterator[Path]:
    """Yield the files outside the site's folders that a page links to."""
    for _, link, _ in LINK.findall(file.content_string):
        path = _in_repository(file.src_uri, link)
        if not path.is_relative_to("docs") and not path.is_relative_to(EXPERIMENTS) and (ROOT / path).is_file():
            yield path


def _in_repository(page: str, link: str) -> Path:
    """Return the target of a page's link, relative to the root of the repository."""
    if not Path(page).is_relative_to(EXPERIMENTS):
        page = page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"
    return Path(posixpath.normpath(posixpath.join(posixpath.dirname(page), link)))


def _page_of(path: Path) -> str:
    return f"repository/{path}" if path.suffix == ".md" else f"repository/{path}.md"
