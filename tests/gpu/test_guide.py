"""The launch by hand of docs/writing_a_kernel_template.md, which a page cannot run without a device."""

from tests.test_docs import ROOT, blocks


def test_the_guide_s_launch_by_hand(hopper: None) -> None:
    page, names = ROOT / "docs" / "writing_a_kernel_template.md", {"__name__": "documentation"}
    ran = [kind for kind, code in blocks(page) if exec(compile(code, page.name, "exec"), names) is None]
    assert sum(kind.startswith("no-test") for kind in ran) == 1
