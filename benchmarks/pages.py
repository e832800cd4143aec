"""Tables in the pages of docs/ that are made from recorded results: between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Source = TypeVar("Source")


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in lines)


def fill(text: str, sections: Mapping[str, Callable[[Source], str]], source: Source) -> str:
    """The page with what stands between the markers of every section made anew; a section without markers is left out."""
    for name, make in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}{make(source)}\n{end}{tail}" if rest else text
    return text
