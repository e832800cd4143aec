"""Says what is done with experts' weights where no matrix product of single experts with tokens is seen, or only of their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.fx

from hexa_fx.capture import CapturedBlock, record_of
from hexa_fx.passes.detect.graph import CONTRACTIONS, is_float, operation
from hexa_fx.passes.detect.projections import Contraction
from hexa_fx.passes.detect.tags import Tag, expert_groups, uneven_experts
from hexa_fx.passes.detect.verdict import Refuse

_NONE = (
    "no matrix product with the weights of single experts was seen; experts are like modules in a list or a dictionary, or "
    "parameters with the experts as their first dimension, and their layers are matrix products"
)
_MERGED = (
    "experts' weights are added up before tokens meet them (a soft mixture of weights), so that no token is given to an expert; "
    "only mixtures of what experts give are rewritten"
)
_LOOKED_UP = (
    "its experts are tables of vectors that are looked up (embedding), with no matrix product to save; only experts that multiply "
    "matrices are rewritten"
)
_CONVOLUTION = (
    "its experts are convolutions ({}); only experts of matrix products are rewritten, as those of nn.Linear on channels that come "
    "last, which a 1x1 convolution is too"
)
_SLICED = (
    "the code multiplies with slices of an expert's matrix ({}) and puts the results side by side, as pretraining_tp above 1 "
    "does; one product with the whole matrix (pretraining_tp=1) gives the same and can be rewritten"
)
_PARTS = frozenset("getitem split chunk narrow unbind tensor_split split_with_sizes detach t transpose".split())


def multiplies_with_slices(captured: CapturedBlock) -> Refuse | None:
    """The refusal of a block that joins products with several parts of an expert's parameter; None if it does not."""
    groups = expert_groups(captured.named_tensors()).members.values()
    listed = {name for names in groups for name in names}
    for node in captured.graph.find_nodes(op="call_function", target=torch.cat, sort=False):
        products = [n for n in node.all_input_nodes if operation(n) in CONTRACTIONS and len(n.all_input_nodes) > 1]
        weights = {_whole(n.all_input_nodes[1]) for n in products}
        if len(products) > 1 and len(weights) == 1:
            (whole,) = weights
            part = record_of(products[0].all_input_nodes[1]).value
            # fewer dimensions: of one expert, in a parameter of all
            if whole.target in listed and part.numel() < _numel(whole) and part.dim() == record_of(whole).value.dim():
                return Refuse(_SLICED.format(whole.target), node)
    return None


def _whole(part: torch.fx.Node) -> torch.fx.Node:
    while part.op != "get_attr" and operation(part) in _PARTS:
        part = part.all_input_nodes[0]
    return part


def _numel(node: torch.fx.Node) -> int:
    return int(record_of(node).value.numel())


def without_products(captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag]) -> Refuse:
    """The refusal of a block in which no product reads experts' weights."""
    uneven = uneven_experts(captured.named_tensors())
    node = next(_readers(captured, tags), None)
    if uneven or node is None:
        return Refuse(uneven or _NONE)
    name = operation(node)
    if name == "embedding":
        return Refuse(_LOOKED_UP, node)
    if name.startswith("conv"):
        return Refuse(_CONVOLUTION.format(name), node)
    if name in CONTRACTIONS | {"mul", "sum", "__rmul__"} and record_of(node).value.dim() >= 2:
        return Refuse(_MERGED, node)
    return Refuse(f"{_NONE} (here {name} reads them first)", node)


def refuse_merged_weights(contractions: Sequence[Contraction]) -> None:
    """Refuses products that add up experts' weights.

    Raises:
        Refuse: a product of all experts' weights with a number for each expert gives matrices like theirs.
    """
    for each in contractions:
        weight, data, result = (record_of(node).value for node in (each.weight, each.data, each.node))
        stacked = weight.dim() == 3 and data.shape[-1] == weight.shape[0]
        if stacked and result.shape[-2:] == weight.shape[-2:] and len(weight) != weight.shape[1]:
            raise Refuse(_MERGED, each.node)


def _readers(captured: CapturedBlock, tags: Mapping[torch.fx.Node, Tag]) -> Iterator[torch.fx.Node]:
    """Operations on experts' weights and something else, in order."""
    for node in captured.graph.nodes:
        if node.op == "output" or tags[node].weight or not is_float(node):
            continue
        if any(tags[n].weight and _is_experts(n, tags[n], captured) for n in node.all_input_nodes):
            yield node


def _is_experts(node: torch.fx.Node, tag: Tag, captured: CapturedBlock) -> bool:
    stacked = (captured.tensor_of(base) for base in tag.bases if "{}" not in base)
    return bool(tag.experts) or any(parameter.dim() >= 3 for parameter in stacked)
