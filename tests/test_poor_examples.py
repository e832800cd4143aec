"""Equal, repeated and single tokens in the example give what a good example gives."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hexa_fx
from hexa_fx.analysis import ModelAnalysis, analyse_model
from hexa_fx.capture.observe import Observation
from hexa_fx.config import HexaConfig
from hexa_fx.example_inputs import call_arguments
from hexa_fx.inspection.inspector import Inspector
from hexa_fx.passes.inputs.distinct_tokens import examples, number_alike, number_of_experts
from tests.zoo import families, pattern_table, poor_examples
from tests.zoo.common import MLP, Looped
from tests.zoo.compare import compare, operators_run
from tests.zoo.registry import by_name

POOR = ("zeros", "ones", "repeated", "one")
STYLES = (
    "loop_onehot_hit_only sorted_split_counts sorted_gathered_bmm dense_scaled_input_bmm capacity_padded_bmm".split()
)


def analysed(model: nn.Module, inputs: object, verify: bool = True) -> ModelAnalysis:
    return analyse_model(model, inputs, HexaConfig(verify=verify), Inspector())


def graphs(analysis: ModelAnalysis) -> dict[str, str]:
    """By path, the rewritten graph as text."""
    return {a.path: str(a.rewritten.graph) for a in analysis.analyses if a.rewritten is not None}


@pytest.mark.parametrize("style", STYLES)
def test_the_same_graph_as_on_a_good_example(style: str) -> None:
    v = by_name(style)
    model = v.make(0).eval()
    good = v.inputs(2, 7, torch.float32, 0)[0]  # verification may ask for another form, so both are compared
    expected = {verify: graphs(analysed(model, good, verify)) for verify in (True, False)}
    assert all(expected.values())
    for name in POOR:
        args, _ = poor_examples.BY_NAME[name](v, torch.float32)
        assert graphs(analysed(model, args, verify=name == "zeros")) == expected[name == "zeros"], name


def test_an_example_that_is_not_finite_and_one_without_tokens() -> None:
    v = by_name(STYLES[0])
    model, (x, *others) = v.make(0).eval(), v.inputs(2, 7, torch.float32, 0)[0]
    assert graphs(analysed(model, (torch.full_like(x, torch.nan), *others), False)) == graphs(
        analysed(model, (x, *others), False)
    )
    (block,) = analysed(model, (x[:0], *others), False).report.blocks
    assert block.reason == "its experts did not run on the example: give an example that reaches them"
    assert not block.advice


class OnSeries(nn.Module):
    """Experts that forecast whole series of one number at a time by two products side by side, as those of linear forecasters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.trends, self.rests = (nn.ModuleList(nn.Linear(8, 8) for _ in range(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x.squeeze(-1)).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, (trend, rest) in enumerate(zip(self.trends, self.rests)):
            row, slot = torch.where(index == number)
            mean = x[row].mean(1, keepdim=True).expand(-1, 8, -1)
            found = trend(mean.transpose(1, 2)) + rest((x[row] - mean).transpose(1, 2))
            out = out.index_add(0, row, found.transpose(1, 2) * weights[row, slot, None, None])
        return out


def test_series_of_one_number_at_a_time_are_not_alike() -> None:
    (block,) = analysed(OnSeries().eval(), (torch.randn(12, 8, 1),)).report.blocks
    assert block.reason.startswith("each expert has a single matrix product, or several side by side")
    assert "alike" not in block.reason


class SequenceFirst(Looped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1).contiguous()).transpose(0, 1)


def test_an_example_whose_tokens_all_choose_alike() -> None:
    """Then ids are the same in any order of tokens; whose weights they are tells the order in which experts are given tokens."""
    torch.manual_seed(0)
    model = SequenceFirst(lambda: MLP(8, 12), 8, bias=True).double()
    with torch.no_grad():
        model.router.weight.mul_(1e-4)
    optimized = hexa_fx.optimize(model, torch.randn(2, 9, 8, dtype=torch.float64))
    assert optimized.report.rewritten, optimized.report
    with torch.no_grad():
        model.router.weight.mul_(1e4)
    assert compare(model, optimized, (torch.randn(3, 5, 8, dtype=torch.float64),)).within(1e-10)


class Skipping(Looped):
    """Experts of a form that is read from several, in a loop that leaves out those without tokens."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), 8, 2, 1, bias=True)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for number in indices.unique().tolist():
            token, slot = torch.where(indices == number)
            out.index_add_(0, token, self.experts[number](flat[token]) * weights[token, slot, None])
        return out


def test_an_example_that_reaches_one_expert() -> None:
    torch.manual_seed(0)
    model, x = Skipping().double(), torch.randn(400, 8, dtype=torch.float64)
    first = x[model.router(x).argmax(-1) == 0]
    optimized = hexa_fx.optimize(model, first[:5])
    assert optimized.report.rewritten, optimized.report
    assert compare(model, optimized, (x[:30],)).within(1e-10)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([50.0, 0.0]))
    (block,) = hexa_fx.explain(model, x[:20]).blocks
    assert "only one of the experts gets tokens here" in block.reason
    assert not block.advice


class Padded(Looped):
    """Sets padding to zero, of which experts with biases make rows that are alike."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * mask[..., None].to(x.dtype))


class PaddedOtherwise(Looped):
    """The mask says what is padding."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x.masked_fill(mask[..., None], 0.0))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Padded, torch.bool), (Padded, torch.int64), (Padded, torch.float64), (PaddedOtherwise, torch.bool)],
)
def test_an_example_with_padding_that_the_block_masks(kind: type[Looped], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kind(lambda: MLP(8, 12), 8).double()
    mask = (torch.arange(9) < torch.tensor([[7], [4]])).to(dtype)
    optimized = hexa_fx.optimize(model, (torch.randn(2, 9, 8, dtype=torch.float64), mask))
    assert optimized.report.rewritten, optimized.report
    for lengths in ([[3], [5], [1]], [[5], [5], [5]]):
        given = torch.randn(3, 5, 8, dtype=torch.float64), (torch.arange(5) < torch.tensor(lengths)).to(dtype)
        assert operators_run(optimized, given)
        assert compare(model, optimized, given).within(1e-10)


@pytest.mark.parametrize("name", POOR)
@pytest.mark.parametrize("style", STYLES[:2])
def test_the_same_numbers(style: str, name: str) -> None:
    v = by_name(style)
    model = v.make(1).double().eval()
    opt = pattern_table.optimized(model, *poor_examples.BY_NAME[name](v, torch.float64))
    for place, (batch, seq) in enumerate(((2, 7), (1, 1), (3, 5))):
        args, kwargs = v.inputs(batch, seq, torch.float64, 6)
        assert operators_run(opt, args, kwargs)
        assert compare(model, opt, args, kwargs, train=bool(place), seed=3).within(1e-10)
        equal = tuple(torch.ones_like(a) for a in args)
        assert compare(model, opt, equal, kwargs, seed=3).within(1e-10)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "switch_transformers"])
def test_language_models(family: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    model = families.make(family)
    expected = graphs(analysed(model, families.inputs(2, 7)))
    assert len(expected) == families.FAMILIES[family].blocks
    for name in ("zeros", "repeated", "one"):
        assert graphs(analysed(model, poor_examples.ids(name), verify=name == "zeros")) == expected, name


class Experts(nn.Module):
    """Five experts in matrices of two dimensions, so that their number is not to be seen, given their routing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(60, 8)), nn.Parameter(torch.randn(60, 8))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        up, down, out = self.up.view(5, 12, 8), self.down.view(5, 12, 8), torch.zeros_like(x)
        for e in range(5):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, F.relu(x[token] @ up[e].T) @ down[e] * weight[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 5), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weight)


def test_a_routing_of_unknown_range_is_left_to_the_block_around() -> None:
    """On equal tokens all ids are alike; whatever is made of them there must not be taken for the routing."""
    model = Block().double()
    report = hexa_fx.explain(model, torch.ones(9, 8, dtype=torch.float64))
    assert [block.path for block in report.rewritten] == [""]
    assert [block.path for block in hexa_fx.explain(model, torch.randn(9, 8).double()).rewritten] == ["experts"]


class FromIds(Looped):
    """Embeddings and mixture in one forward."""

    def __init__(self) -> None:
        super().__init__(lambda: MLP(8, 12), 8)
        self.words = nn.Embedding(23, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids.flatten())
        return self.mix(x, *self.route(x)).unflatten(0, input_ids.shape)


@pytest.mark.parametrize("ids", [torch.zeros(2, 6, dtype=torch.long), torch.tensor([[3]]), torch.arange(18) % 4])
def test_ids_are_drawn_where_the_block_looks_them_up(ids: torch.Tensor) -> None:
    model = FromIds().double()
    opt = hexa_fx.optimize(model, ids)
    assert opt.report.rewritten
    other = torch.randint(0, 23, (4, 5) if ids.dim() == 2 else (9,))
    assert operators_run(opt, (other,), {})
    torch.testing.assert_close(opt(other), model(other), rtol=1e-10, atol=1e-12)


class Hashed(nn.Module):
    """Each token of each sequence comes with its one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(8))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, place = torch.where(ids == e)
            out[row, place] = out[row, place] + expert(x[row, place])
        return out


@pytest.mark.parametrize("x", [torch.randn(2, 7, 8), torch.ones(2, 7, 8)], ids=["random", "equal"])
def test_one_expert_is_given_for_each_token_of_each_sequence(x: torch.Tensor) -> None:
    model = Hashed().double()
    opt = hexa_fx.optimize(model, (x.double(), torch.randint(0, 8, (2, 7))))
    assert opt.report.rewritten, str(opt.report)
    other = torch.randn(3, 5, 8).double(), torch.randint(0, 8, (3, 5))
    assert operators_run(opt, other, {})
    torch.testing.assert_close(opt(*other), model(*other), rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(m(*other).sin().sum(), list(m.parameters())) for m in (model, opt)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-12)


def test_filters_are_no_experts_and_are_not_counted() -> None:
    block = nn.Module()
    block.up, block.down = nn.Parameter(torch.zeros(5, 8, 12)), nn.Parameter(torch.zeros(5, 12, 8))
    block.mix, block.filter = (nn.Conv1d(64, 64, 4, groups=64) for _ in range(2))
    assert number_of_experts(block) == 5


class OnlyEqual(Block):
    """Code that takes no other tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.equal(x, x[:1].expand_as(x)):
            raise ValueError("tokens differ")
        return super().forward(x)


def test_where_other_tokens_are_not_taken_the_example_is_named() -> None:
    report = hexa_fx.explain(OnlyEqual(), torch.ones(9, 8))
    assert report.refused
    assert all("give example inputs with different tokens" in block.reason for block in report.refused)


def test_a_true_refusal_keeps_its_reason() -> None:
    v = by_name("refuse_max_combine")
    good, poor = (poor_examples.BY_NAME[name](v, torch.float32) for name in ("good", "ones"))
    reasons = [[b.reason for b in hexa_fx.explain(v.make(0), args).refused] for args, _ in (good, poor)]
    assert reasons[0] == reasons[1] != []


def test_what_else_a_block_is_given_stays() -> None:
    x, mask, position = torch.zeros(2, 6, 8), torch.ones(2, 6, dtype=torch.bool), torch.arange(6).expand(2, 6)
    mask[1, 4:] = False
    block = Block()
    assert number_of_experts(block) is None
    first, *_, last = examples(Observation("", block, (x,), {"mask": mask, "position": position}))
    assert number_alike(first.args[0].flatten(0, 1).double()) == 0
    assert torch.equal(first.kwargs["mask"], mask)
    assert torch.equal(first.kwargs["position"], position)
    assert last.args[0] is x
    grown = next(examples(Observation("", block, (x[:1, :1],), {"mask": mask[:1, :1]})))
    assert grown.args[0].shape == (2, 8, 8)
    assert grown.kwargs["mask"].shape == (2, 8)
    assert number_alike(grown.args[0].flatten(0, 1).double()) == 0


def test_rows_alike_but_for_rounding_and_scale() -> None:
    row = torch.randn(1, 8).double()
    assert number_alike(torch.cat([row, 2 * row, row * (1 + 1e-7), -row, torch.randn(1, 8).double()])) == 2
    assert number_alike(torch.zeros(4, 8).double()) == 4  # nor does a single one show where it goes
    assert number_alike(torch.randn(100, 8).double()) == 0
    rows = torch.randn(5, 8).double()
    for number, factor in enumerate((0.0, 1e-9, float("inf"), float("nan"))):
        rows[number] *= factor
    assert number_alike(rows) == 4


def test_good_examples_are_used_as_they_are() -> None:
    x = torch.randn(9, 8)
    (only,) = examples(Observation("", Block(), (x,), {}))
    assert only.args[0] is x
    assert call_arguments(x) == ((x,), {})


class WithMask(Looped):
    """Is given a mask that it does not look at."""

    def __init__(self) -> None:
        super().__init__(lambda: MLP(8, 12), 8, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool, torch.float64])
def test_two_equal_tokens_and_a_mask(dtype: torch.dtype) -> None:
    """As in every first layer of a language model."""
    x = torch.randn(2, 24, 8, dtype=torch.float64)
    x[0, 3] = x[1, 5]
    report = hexa_fx.explain(WithMask().double(), (x, torch.ones(2, 24, dtype=dtype)))
    assert report.rewritten, report


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_one_row_of_zeros_in_the_first_call(family: str) -> None:
    """As a token of padding is, whose embedding is zero."""
    experts = families.make(family).get_submodule("model.layers.0.mlp.experts")
    x, ids = (
        torch.randn(32, experts.hidden_size if family == "gpt_oss" else experts.hidden_dim),
        torch.rand(32, experts.num_experts),
    )
    x[5] = 0
    given = x, ids.topk(2).indices, torch.rand(32, 2)
    optimized = hexa_fx.optimize(experts, None, HexaConfig(own_code_when_small=False))
    torch.testing.assert_close(optimized(*given), experts(*given))
    assert operators_run(optimized, given), str(optimized.report)


class CountsWhereItRuns(Looped):
    """Leaves out experts without tokens, and counts those of the others, in a buffer and in a tensor that is none."""

    def __init__(self, of_sequences: bool) -> None:
        super().__init__(lambda: MLP(8, 12), 8, 6, 1)
        self.of_sequences, self.seen = of_sequences, torch.zeros(6)
        self.register_buffer("counts", torch.zeros(6))

    def forward(self, x: torch.Tensor, of_sequence: torch.Tensor) -> torch.Tensor:
        return self.mix(x, of_sequence.expand_as(x) if self.of_sequences else x)

    def mix(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(seen).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (index == number).any(-1)
            if mask.any():
                self.counts[number] += mask.sum()
                self.seen[number] += mask.sum().item()
                out[mask] += expert(x[mask]) * weights[index == number].unsqueeze(-1)
        return out


@pytest.mark.parametrize(("of_sequences", "size"), [(False, (1, 4)), (True, (2, 20))])
def test_what_code_counts_where_experts_run_that_got_no_tokens_of_the_example(
    of_sequences: bool, size: tuple[int, int]
) -> None:
    torch.manual_seed(3)
    model = CountsWhereItRuns(of_sequences).double()
    opt = hexa_fx.optimize(model, (given := sequences(*size)), config=HexaConfig(own_code_when_small=False))
    assert operators_run(opt, given), str(opt.report)
    for batch in (9, 2, 1):
        given = sequences(batch, 5)
        assert compare(model, opt, given).within(1e-10)
        model.seen.zero_(), opt.seen.zero_()
        model(*given), opt(*given)
        assert torch.equal(model.seen, opt.seen)


class OfTasks(CountsWhereItRuns):
    """Routes by a task of each sequence as well, as multi-task trainers do; there are fewer tasks than experts."""

    def __init__(self) -> None:
        super().__init__(of_sequences=False)
        self.task = nn.Embedding(3, 8)

    def forward(self, x: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
        return self.mix(x, x + self.task(tasks).unsqueeze(1))


def test_what_code_counts_beside_numbers_of_tasks() -> None:
    torch.manual_seed(3)
    model = OfTasks().double()
    opt = hexa_fx.optimize(model, (sequences(2, 2)[0], torch.tensor([0, 2])), HexaConfig(own_code_when_small=False))
    assert opt.report.rewritten, str(opt.report)
    for batch in (9, 2, 1):
        assert compare(model, opt, (sequences(batch, 5)[0], torch.arange(batch) % 3), train=True).within(1e-10)


def sequences(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, length, 8, dtype=torch.float64), torch.randn(batch, 1, 8, dtype=torch.float64)


class _OverNeighbours(nn.Module):
    """Around a block, as of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = by_name(STYLES[0]).make(0)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.moe(torch.mm(adjacency, x.flatten(0, 1)).view_as(x))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("given", [True, False])
def test_the_model_around_takes_a_sparse_matrix(layout: torch.layout, given: bool) -> None:
    """As of VITA-Group/Graph-Mixture-of-Experts: it was cut as tokens are, and optimize failed."""
    model = _OverNeighbours().eval()
    x = by_name(STYLES[0]).inputs(2, 7, torch.float32, 0)[0][0]
    inputs = x, torch.rand(14, 14).relu().to_sparse(layout=layout)
    expected = model(*inputs)
    optimized = hexa_fx.optimize(model, inputs if given else None)
    for _ in range(2):
        torch.testing.assert_close(optimized(*inputs), expected)
    assert operators_run(optimized, inputs)
