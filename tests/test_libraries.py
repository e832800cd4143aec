"""Blocks of the installed libraries of benchmarks/libraries.txt: what becomes of each is what docs/libraries.md says.

`.ci/run` runs these in an environment of their own. Where a library is not installed, its blocks are skipped.
"""

import importlib.metadata
from functools import cache
from pathlib import Path

import pytest

from benchmarks.libraries import judge
from benchmarks.library_registry import BLOCKS, LibraryBlock

ROOT = Path(__file__).parents[1]
SLOW = frozenset({"deepspeed", "torchtitan"})
"""The first compiles operators of its own where it runs first; the second imports triton."""


@cache
def page() -> dict[tuple[str, str], tuple[str, str]]:
    """Version and outcome of every block on the page, by distribution and what the block is."""
    lines = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:5]] for line in lines if line.startswith("| ")]
    return {(library, what): (version, outcome) for library, version, what, outcome in cells[1:]}


def _marked(block: LibraryBlock) -> object:
    marks = pytest.mark.slow if block.distribution in SLOW else ()
    return pytest.param(block, id=f"{block.distribution}: {block.what}", marks=marks)


@pytest.mark.parametrize("block", map(_marked, BLOCKS))
def test_what_the_page_says(block: LibraryBlock) -> None:
    version, outcome = page()[block.distribution, block.what]
    try:
        installed = importlib.metadata.version(block.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{block.distribution} is not installed")
    assert installed == version, "python benchmarks/libraries.py --write docs/libraries.md"
    row = judge(block)
    assert row.outcome == outcome, row.detail
    if outcome == "rewritten":
        assert row.forward is not None
        assert row.gradient is not None
        assert max(row.forward, row.gradient) < 2e-5  # of routers that are float32 in all dtypes


def test_the_page_has_every_block() -> None:
    assert list(page()) == [(block.distribution, block.what) for block in BLOCKS]
    assert sum(outcome == "rewritten" for _, outcome in page().values()) >= 22


def test_versions_are_pinned() -> None:
    lines = (ROOT / "benchmarks" / "libraries.txt").read_text(encoding="utf-8").lower().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(pinned[library.lower()] == version for (library, _), (version, _) in page().items())
