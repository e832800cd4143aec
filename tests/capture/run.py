"""Runs what a block's run recorded."""

from typing import Any

import torch
from torch import nn

from hexa_fx.capture import CapturedBlock
from hexa_fx.torch_private import _assign_attr


def run(captured: CapturedBlock, *args: Any) -> Any:
    """What the recorded graph gives for other tensors."""
    root = nn.Module()
    for node in captured.graph.find_nodes(op="get_attr"):
        _assign_attr(captured.tensor_of(str(node.target)).detach(), root, str(node.target))
    return torch.fx.GraphModule(root, captured.graph)(*args)
