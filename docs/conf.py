"""The site, for `make docs`. Sphinx, with MyST and furo: it is kept by many, reads the Markdown that GitHub shows, and makes
warnings errors; MkDocs is not kept any more. No page asks the network for anything.

The contents are the links of index.md, under its headings. Links to what is no page lead to copies in the site: of sources
to a page with their text, of anything else to the file as it is."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
LEXERS = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml", ".md": "markdown"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)\)")
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)

project = "warpnorm"
extensions = ["myst_parser"]
myst_heading_anchors = 3
highlight_language = "text"
smartquotes = False
html_theme = "furo"
html_title = "warpnorm"
html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False

STYLE = "<style>@media (min-width: 97em) { div.content { width: 62em } }</style>"

linked: set[Path] = set()  # files that are no pages; complete where every page is read anew


def read(app: Any, docname: str, source: list[str]) -> None:
    """Adds the contents, which Markdown has no word for, and leads links to where the site has the files."""
    text = source[0]
    if docname == "index":
        for section in text.split("\n## ")[1:]:
            pages = [path.removesuffix(".md") for _, path in LINK.findall(section) if is_page(HERE / path)]
            caption = section.splitlines()[0]
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
    folder = (HERE / docname).parent
    parts = FENCE.split(text)  # every second one is a block
    parts[::2] = [LINK.sub(lambda link: led(link, folder), part) for part in parts[::2]]
    source[0] = "".join(parts)


def is_page(path: Path) -> bool:
    return path.suffix == ".md" and HERE in path.resolve().parents


def led(link: re.Match[str], folder: Path) -> str:
    path = (folder / link[2]).resolve()
    if is_page(path) or not path.is_file():  # Sphinx says what is wrong
        return link[0]
    linked.add(path)
    return f'<a class="reference internal" href="{os.path.relpath(HERE / place(path), folder)}">{link[1]}</a>'


def place(path: Path) -> str:
    """Where in the site a file is that is no page of its own."""
    name = f"source/{path.relative_to(ROOT)}"
    return f"{name}.html" if path.suffix in LEXERS else name


def sources(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each source."""
    for path in sorted(path for path in linked if path.suffix in LEXERS):
        name = path.relative_to(ROOT)
        text = app.builder.highlighter.highlight_block(path.read_text(), LEXERS[path.suffix], linenos=False)
        yield place(path).removesuffix(".html"), {"title": name, "body": f"<h1>{name}</h1>{text}"}, "page.html"


def copy(app: Any, error: Exception | None) -> None:
    for path in linked if error is None else ():
        if path.suffix not in LEXERS:
            target = Path(app.outdir) / place(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def widen(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """So that lines of code fit."""
    context["metatags"] = context.get("metatags", "") + STYLE


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", widen)
    app.connect("source-read", read)
    app.connect("html-collect-pages", sources)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": False}
