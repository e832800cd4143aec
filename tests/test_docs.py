"""Every Python block of the README and of docs/ runs; the blocks of one page share their names, as a reader would run them.

A fence ``python no-test`` (with the reason after it, or in the text before) is compiled only: it needs a GPU, several processes, or
is a part of code that stands elsewhere.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
CHECKPOINT = "allenai/OLMoE-1B-7B-0924"
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(what stands behind ``python``, code) of every block; empty lines before the code keep the page's line numbers."""
    text = page.read_text(encoding="utf-8")
    return [
        (found.group(1).strip(), "\n" * text[: found.start(2)].count("\n") + found.group(2))
        for found in FENCE.finditer(text)
    ]


def marks(page: Path) -> object:
    return pytest.param(page, id=page.relative_to(ROOT).as_posix())


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files that a page writes go to a folder of their own, and levels of logs that it sets last as long as it runs; the backend's
    name is known also where an older installation is.
    """
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    if "hexa" not in torch._dynamo.list_backends():
        from hexa_fx.integrations.dynamo import hexa

        torch._dynamo.register_backend(hexa, name="hexa")
    levels = {log: log.level for log in (logging.root, logging.getLogger("hexa_fx"))}
    yield
    for log, level in levels.items():
        log.setLevel(level)


@pytest.mark.parametrize("page", [marks(page) for page in PAGES if blocks(page)])
def test_blocks_of_the_page_run(page: Path) -> None:
    _run(page)


@pytest.mark.usefixtures("own_code_when_small")
def test_what_the_readme_begins_with_runs_on_the_operators() -> None:
    report = _run(ROOT / "README.md")["model"].report  # type: ignore[attr-defined]
    assert [block.status for block in report.blocks] == ["rewritten"] * 2
    assert all(block.calls.rewritten and not block.calls.own for block in report.blocks)


def _run(page: Path) -> dict[str, object]:
    """The page's names after its blocks have run, in a folder with a tiny model in place of the checkpoint that pages load."""
    pytest.importorskip("transformers")
    from hexa_fx.integrations.tiny_models import tiny_model

    if any(CHECKPOINT in code for _, code in blocks(page)):
        tiny_model("olmoe")[0].save_pretrained(CHECKPOINT)
    names: dict[str, object] = {"__name__": "documentation"}
    for kind, code in blocks(page):
        compiled = compile(code, page.name, "exec", dont_inherit=True)
        if not kind.startswith("no-test"):
            assert not kind, f"{page.name}: a fence says {kind!r}; only `no-test` is known"
            exec(compiled, names)
    return names


def test_no_block_is_hidden_by_another_spelling() -> None:
    """``py``, ``Python`` and the like would not be found above."""
    for page in PAGES:
        for info in re.findall(r"^```(\S*)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert info in ("", "python", "bash", "text", "html", "cuda", "toml", "json"), f"{page.name}: ```{info}"


def test_every_page_is_linked() -> None:
    """A page that nothing leads to is not found by anyone."""
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    }
    assert not [page.name for page in PAGES[1:-1] if page.resolve() not in linked]


def test_every_page_is_on_the_site() -> None:
    """In the navigation of mkdocs.yml, without which the site is not built."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    pages += [f"examples/{script.stem}.md" for script in (ROOT / "examples").glob("*.py")]
    assert not [page for page in pages if f" {page}\n" not in nav]


def test_the_reference_has_all_that_the_package_gives() -> None:
    import hexa_fx

    shown = re.findall(
        r"^::: [\w.]*\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(hexa_fx.__all__) <= set(shown)


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """Ours, in the first column; so that a sentence that is changed is changed there too."""
    folders = [*(ROOT / "hexa_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in folders))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        text.strip(" .") for text in re.findall(r"^\| `(?:\.\.\. )?([^`]+?)(?:\.\.\.[^`]*)?`", page, re.MULTILINE)
    ]
    torchs = ("Unsupported", "Could not guard", "Invalid backend", "unrecognized namespace")
    ours = [text for text in quoted if not text.startswith(torchs)]
    assert len(ours) > 8
    assert not [text for text in ours if text not in source]
