"""A hook of mkdocs: pages of the site that lie elsewhere in the repository, and links to them.

README.md is the first page; CONTRIBUTING.md, CHANGELOG.md, the log of experiments and the examples follow. The notebook and
measured figures, which they link to, are copied as they are. The files keep links that work where they lie, rewritten here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/LOG.md": "log.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))},
}
"""Page of the site by file of the repository. All others lie in docs/ and keep their names."""

_RESULTS = [f"benchmarks/results/{path.name}" for path in sorted((ROOT / "benchmarks/results").glob("*.json"))]
_AS_IT_IS = ["examples/walkthrough.ipynb", *_RESULTS]
_FENCE = re.compile(r"^```python [^\n]*", re.MULTILINE)
_LINK = re.compile(r"(\]\(|src(?:set)?=\")([^)#\"\s:]+)((?:#[^)\"]*)?[)\"])")


def on_files(files: Files, config: Any) -> Files:
    """Adds pages and files from elsewhere."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_as_page(source, text)))
    for source in _AS_IT_IS:
        files.append(File(source, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links of a page to where its files are on the site; what fences say for our tests is left out."""
    place = page.file.src_uri
    source = next((name for name, there in ELSEWHERE.items() if there == place), f"docs/{place}")
    markdown = _LINK.sub(lambda found: found[1] + _moved(source, place, found[2]) + found[3], markdown)
    return _FENCE.sub("```python", markdown)


def _as_page(source: str, text: str) -> str:
    if not source.endswith(".py"):
        return text
    return f"# {Path(source).name}\n\n```python\n{text}```\n"


def _moved(source: str, place: str, target: str) -> str:
    """A link of the file ``source``, which is the page ``place``, as the site needs it."""
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = ELSEWHERE.get(there) or there.removeprefix("docs/")
    return posixpath.relpath(page, posixpath.dirname(place) or ".")
