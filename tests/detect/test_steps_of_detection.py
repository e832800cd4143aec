"""Every step of detection alone: tags, row matching, combine, routing, rules, and the refusals they end in."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hexa_fx.capture import capture, record_of
from hexa_fx.capture.replay import Replay
from hexa_fx.ir import Refusal
from hexa_fx.passes.detect import detect_block
from hexa_fx.passes.detect.projections import find_contractions, group_instances
from hexa_fx.passes.detect.rows import RowMatcher, laid_out, row_orders
from hexa_fx.passes.detect.tags import expert_groups, tag, uneven_experts

D, H, E, K = 6, 5, 4, 2
X = torch.randn(3, 7, D, generator=torch.Generator().manual_seed(2))


class Mlp(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, H), nn.Linear(H, D), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Loop(nn.Module):
    """The plain loop; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(self.router(tokens), -1).topk(K, -1)

    def expert(self, number: int, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.experts[number](rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, D)
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for number in range(E):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, self.expert(number, tokens[token], out) * weights[token, slot, None])
        return out.view(x.shape)


def found(block: nn.Module, *args: torch.Tensor):
    torch.manual_seed(0)
    return detect_block(capture(block, args or (X,), {}))


def reason(block: nn.Module) -> str:
    refusal = found(block)
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


def zeros(*names: str, size: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(size, 2) for name in names}


def named(*children: str, prefix: str = "experts.") -> dict[str, torch.Tensor]:
    return zeros(*(f"{prefix}{child}.{layer}.weight" for child in children for layer in ("up", "down")))


def nested(experts: int) -> dict[str, torch.Tensor]:
    return zeros(*(f"experts.{e}.{layer}.weight" for e in range(experts) for layer in range(2)))


UP_AND_DOWN = {"experts.{}.up.weight", "experts.{}.down.weight"}
GROUPS: dict[str, tuple[dict[str, torch.Tensor], set[str]]] = {
    "numbered from 0": (zeros(*(f"experts.{e}.weight" for e in range(3))), {"experts.{}.weight"}),
    "numbers missing": (zeros("layers.0.weight", "layers.2.weight"), set()),
    "of two shapes": (zeros("gates.0") | zeros("gates.1", size=3), set()),
    "the longest list": (nested(5), {"experts.{}.0.weight", "experts.{}.1.weight"}),
    "the outer list": (nested(2), {"experts.{}.0.weight", "experts.{}.1.weight"}),
    "named neighbours": (named("code", "math", "law") | zeros("gate.weight", size=3), UP_AND_DOWN),
    "numbers before names": (
        named("a", "b", "c") | named("0", "1", prefix="layers."),
        {"layers.{}.up.weight", "layers.{}.down.weight"},
    ),
    "named, one matrix each": (zeros("experts.query.weight", "experts.key.weight"), set()),
    "one name": (named("code"), set()),
    "named, of two shapes": (named("code", "math") | zeros("experts.math.up.weight", size=3), set()),
    "beside stacked weights": (named("code", "math") | {"stacked": torch.zeros(4, 2, 2)}, set()),
}


@pytest.mark.parametrize(("names", "members"), GROUPS.values(), ids=GROUPS)
def test_expert_groups(names: dict[str, torch.Tensor], members: set[str]):
    assert set(expert_groups(names).members) == members


def test_the_larger_of_two_groups_of_names_counts():
    members = expert_groups(named("a", "b") | named("x", "y", "z", prefix="others.")).members
    assert members["others.{}.up.weight"] == ("others.x.up.weight", "others.y.up.weight", "others.z.up.weight")


def test_the_layers_of_like_experts_are_no_experts_of_two_shapes():
    shapes = {"0": (3, 2, 1, 1), "2": (2, 3, 1, 1)}
    names = {f"experts.{e}.{k}.weight": torch.zeros(shape) for e in range(4) for k, shape in shapes.items()}
    assert uneven_experts(names) is None
    assert "differ in shape" in str(uneven_experts(names | {"experts.3.0.weight": torch.zeros(5, 2, 1, 1)}))


def test_layers_of_a_router_are_no_experts_of_several_shapes():
    """As in github.com/isLinXu/YOLO-Master, whose experts are convolutions."""
    names = {"router.0.weight": torch.zeros(3, 2, 1, 1), "router.2.weight": torch.zeros(4, 3, 1, 1)}
    assert "router.{}.weight" in str(uneven_experts(names))
    assert uneven_experts(names, {"router"}) is None


def test_tags_follow_one_expert_and_all_experts():
    block = Loop()
    captured = capture(block, (X,), {})
    tags = tag(captured, expert_groups(dict(block.named_parameters())))
    linear = [
        n for n in captured.graph.nodes if "linear" in str(n.target) and record_of(n).scope.startswith("experts.2")
    ]
    assert all(tags[node].experts == {2} for node in linear)
    router = next(n for n in captured.graph.nodes if record_of(n).scope == "router" and "linear" in str(n.target))
    assert tags[router].experts == frozenset()


def test_row_matcher_finds_token_expert_and_scale():
    tokens, matrices = torch.randn(9, D, dtype=torch.float64), torch.randn(E, H, D, dtype=torch.float64)
    token, expert = torch.randint(0, 9, (20,)), torch.randint(0, E, (20,))
    scale = torch.rand(20, dtype=torch.float64) + 0.1
    rows = scale[:, None] * torch.einsum("rd,rhd->rh", tokens[token], matrices[expert])
    rows[3] = 0
    match = RowMatcher(tokens, matrices).match(rows)
    keep = torch.arange(20) != 3
    assert match.token[3] == -1
    assert torch.equal(match.token[keep], token[keep])
    assert torch.equal(match.expert[keep], expert[keep])
    torch.testing.assert_close(match.scale[keep], scale[keep])


def test_rows_of_an_expert_without_any_may_be_padded():
    assert laid_out(torch.ones(0, D), torch.tensor([-1, -1])).tolist() == [[0] * D] * 2


ROWS = torch.arange(3 * E).reshape(3, E)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda h: h.transpose(0, 1), ROWS.t()),
        (lambda h: h.flip(0).transpose(0, 1), ROWS.flip(0).t()),
        (lambda h: h.transpose(0, 1)[:, 1:], ROWS[1:].t()),
        (lambda h: h.transpose(0, 1) * torch.eye(E, 3)[..., None], torch.where(torch.eye(E, 3) > 0, ROWS.t(), -1)),
        (lambda h: h.transpose(0, 1).cumsum(1), None),
    ],
    ids=["turned", "reversed and turned", "turned, some kept", "turned, some set to zero", "turned and added up"],
)
def test_order_of_rows_between_products(between: Callable[[torch.Tensor], torch.Tensor], expected: torch.Tensor | None):
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(between(F.silu(torch.einsum("td,edh->teh", x, self.up))), self.down)

    captured = capture(Batched(), (X[0, :3],), {})
    pairs = group_instances(find_contractions(captured, tag(captured, expert_groups({}))))
    order = row_orders(pairs, Replay(captured))
    ((first,), second) = pairs[0]
    assert second.data not in order
    if expected is None:
        assert not order
    else:
        assert order[first.node].tolist() == expected.flatten().tolist()


def test_the_plain_loop():
    match = found(Loop())
    assert (match.num_experts, match.routing.top_k) == (E, K)
    assert match.body.activation == "gelu"
    assert match.body.gate_bias == "experts.{}.up.bias"
    assert [source.reading for source in match.routing.after] == ["token_slot"]
    assert match.idiom == "loop over experts"


def test_a_weight_made_of_several_parameters_is_named():
    """Also where operations on matrices that are no rows make it, as LoHa's do."""

    class Made(Loop):
        def expert(self, number: int, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            own = self.experts[number]
            hidden = own.up(rows)
            made = (own.up.weight * torch.tensor(2.0) * own.down.weight.T).reshape(own.up.weight.shape)
            return own.down(F.relu(hidden + F.linear(rows, made)))

    assert "mixes several parameters in its weight" in reason(Made())


def test_experts_of_different_shape_or_structure_are_named():
    class Wider(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.experts[2] = nn.Sequential(nn.Linear(D, H + 2), nn.GELU(), nn.Linear(H + 2, D))
            self.experts[1] = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
            self.experts[0] = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
            self.experts[3] = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))

    assert "experts differ in shape: experts.{}.0.weight is (5, 6) and (7, 6)" in reason(Wider())


def test_a_region_without_gradients_is_known():
    class Frozen(Loop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return super().forward(x)

    assert found(Frozen()).constant
    assert not found(Loop()).constant
