"""The launch by hand of docs/writing_a_kernel_template.md, which a page cannot run without a device."""

import pytest
import torch

from tests.test_docs import ROOT, blocks


def test_the_guide_s_launch_by_hand() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 device")
    page, names = ROOT / "docs" / "writing_a_kernel_template.md", {"__name__": "documentation"}
    ran = [kind for kind, code in blocks(page) if exec(compile(code, page.name, "exec"), names) is None]
    assert sum(kind.startswith("no-test") for kind in ran) == 1
