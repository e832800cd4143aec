"""Blocks whose experts, or what stands around them, are unusual."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.common import MLP, Mixture, SwiGLU, TopKGate
from tests.zoo.variant import D, E, I, variant


class LoRALinear(nn.Module):
    def __init__(self, inp: int, out: int, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__()
        self.base = nn.Linear(inp, out, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(inp, rank, bias=False)
        self.lora_B = nn.Linear(rank, out, bias=False)
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scaling


class LoRAExpert(SwiGLU):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = LoRALinear(D, I), LoRALinear(D, I), LoRALinear(I, D)


class FreshLoRAExpert(LoRAExpert):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.zeros_(part.lora_B.weight)


class FreshNormExpert(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gamma = nn.LayerNorm(D), nn.Parameter(torch.ones(D))
        nn.init.zeros_(self.fc1.bias)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * super().forward(self.norm(x))


class PreNormExpert(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        with torch.no_grad():
            self.norm.weight.add_(0.3 * torch.randn(D))
            self.norm.bias.add_(0.3 * torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class RMSNorm(nn.Module):
    """Root mean square over the last dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class PostNormExpert(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class ScaledExpert(MLP):
    def __init__(self) -> None:
        super().__init__(act=nn.SiLU)
        self.gain, self.gamma = nn.Parameter(torch.randn(()) + 1), nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * super().forward(x) * self.gamma


class CastedExpert(SwiGLU):
    """Weights are kept in one dtype and multiplied in that of the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (each.weight.type_as(x) for each in (self.gate_proj, self.up_proj, self.down_proj))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class ResidualExpert(MLP):
    """The routing weights scale x too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(D, I), nn.ReLU(), nn.Linear(I, 16), nn.Tanh(), nn.Linear(16, D))


class GeGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(D, 2 * I), nn.Linear(I, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.proj_in(x).split(I, dim=-1)
        return self.proj_out(up * F.gelu(gate))


class LearnedActivation(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU(init=float(torch.rand(())))


class DropoutActive(nn.Module):
    """Dropout on what the expert is given, between its layers and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Dropout(0.2)
        self.net = nn.Sequential(nn.Linear(D, I), nn.GELU(), nn.Dropout(0.3), nn.Linear(I, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.net(self.given(x)), 0.1, self.training)


class HalfFrozen(MLP):
    def __init__(self) -> None:
        super().__init__(act=nn.ReLU)
        self.fc1.requires_grad_(False)


class SharedExpert(Mixture):
    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.shared_expert = SwiGLU(hidden=2 * I)
        self.shared_expert_gate = nn.Linear(D, 1, bias=False) if gated else None

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        shared = self.shared_expert(flat)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(flat)) * shared
        return super().mix(flat, weights, indices) + shared


class SharedSameShape(Mixture):
    def __init__(self) -> None:
        super().__init__(MLP)
        self.shared = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(expert(x) for expert in self.shared)


class ZeroAndIdentityExperts(Mixture):
    def __init__(self, identity: bool = True) -> None:
        super().__init__()
        self.identity, self.gate = identity, TopKGate(num_experts=E + 2)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = super().mix(flat, weights, indices)
        if self.identity:
            token, slot = torch.where(indices >= E)
            out.index_add_(0, token, flat[token] * weights[token, slot, None])
        return out


class Latent(Mixture):
    """The router sees the full space."""

    def __init__(self, latent: int = 8) -> None:
        super().__init__(dim=latent)
        self.down, self.up = nn.Linear(D, latent, bias=False), nn.Linear(latent, D, bias=False)

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self.up(super().mix(self.down(flat), weights, indices))


class SharedPostNorm(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(D)

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.experts[e](x))


class WeightBefore(Mixture):
    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            out.index_add_(0, token, self.experts[e](flat[token] * weights[token, slot, None]))
        return out


class WeightBetween(Mixture):
    def __init__(self) -> None:
        super().__init__(None)
        self.up, self.down = (nn.ModuleList(nn.Linear(*size) for _ in range(E)) for size in ((D, I), (I, D)))

    def mix(self, flat: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(flat)
        for e in range(E):
            token, slot = torch.where(indices == e)
            hidden = F.gelu(self.up[e](flat[token])) * weights[token, slot, None]
            out.index_add_(0, token, self.down[e](hidden))
        return out


class SameExpertTwice(Mixture):
    def __init__(self) -> None:
        super().__init__(MLP)
        self.experts[3] = self.experts[1]


class WiderOutput(Mixture):
    def __init__(self, out: int = 28) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(D, I), nn.ReLU(), nn.Linear(I, out)))
        self.out = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, D)
        weights, indices = self.gate(flat)
        result = flat.new_zeros(flat.shape[0], self.out)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(indices == e)
            result[token] += expert(flat[token]) * weights[token, slot, None]
        return result.view(*x.shape[:-1], self.out)


class TwoMixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixture(MLP), Mixture(SwiGLU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


class Conv1x1Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(D, I, 1), nn.Conv1d(I, D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(F.relu(self.conv1(x.unsqueeze(-1)))).squeeze(-1)


VARIANTS = (
    variant("body_lora", Mixture, "LoRA with frozen bases in every projection", make_expert=LoRAExpert),
    variant("body_lora_from_zero", Mixture, "LoRA as it starts, B is zero", make_expert=FreshLoRAExpert),
    variant("body_norm_from_one", Mixture, "norm, scale and biases as they start", make_expert=FreshNormExpert),
    variant("body_pre_layernorm", Mixture, "LayerNorm per expert before its MLP", make_expert=PreNormExpert),
    variant("body_post_rmsnorm", Mixture, "RMSNorm per expert after its MLP", make_expert=PostNormExpert),
    variant("body_scale", Mixture, "scalar and vector scale per expert", make_expert=ScaledExpert),
    variant("body_residual", Mixture, "x + f(x) inside the expert", make_expert=ResidualExpert),
    variant("body_casted_weights", Mixture, "weights cast to the dtype of the tokens", make_expert=CastedExpert),
    variant("body_three_layers", Mixture, "three linear layers", make_expert=three_layers),
    variant("body_one_linear", Mixture, "one linear layer", make_expert=nn.Linear, in_features=D, out_features=D),
    variant("body_geglu", Mixture, "gelu-gated, up half first, biases", make_expert=GeGLU),
    variant("body_prelu", Mixture, "activation with a parameter per expert", make_expert=LearnedActivation),
    variant("body_dropout_active", Mixture, "dropout inside the expert", make_expert=DropoutActive),
    variant("body_half_frozen", Mixture, "first projection frozen", make_expert=HalfFrozen),
    variant("body_conv1x1", Mixture, "experts are 1x1 convolutions", "either", make_expert=Conv1x1Expert),
    variant("around_shared_expert", SharedExpert, "a shared expert is added"),
    variant("around_shared_expert_gated", SharedExpert, "a shared expert behind a sigmoid gate", gated=True),
    variant("around_shared_same_shape", SharedSameShape, "shared experts of the routed ones' shape"),
    variant("around_identity_expert", ZeroAndIdentityExperts, "ids past the experts return the token"),
    variant("around_zero_experts", ZeroAndIdentityExperts, "ids past the experts give zero", identity=False),
    variant("around_latent", Latent, "shared projections into and out of a latent space"),
    variant("around_post_norm", SharedPostNorm, "one norm for all experts' outputs, before the weights"),
    variant("around_two_mixtures", TwoMixtures, "two mixtures in one module"),
    variant("weight_before", WeightBefore, "routing weight on the input"),
    variant("weight_between", WeightBetween, "routing weight between the projections, second bias unscaled"),
    variant("tied_same_expert_twice", SameExpertTwice, "one module twice in the list", "either"),
    variant("body_wider_output", WiderOutput, "output wider than the input"),
)
