"""A packed weight as a parameter: what keeps it packed, what reads it, and what unpacks it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.formats import FORMATS, quantized_weight
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import direct

SHAPE = (4, 32, 64)


@pytest.fixture(params=["nf4", "nf4_double", "fp8_block"])
def weight(request):
    torch.manual_seed(0)
    return QuantizedWeight.of(torch.randn(SHAPE, dtype=torch.bfloat16), request.param)


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def test_a_parameter_of_the_weight_s_shape_and_dtype(weight):
    held = Holder(weight).weight
    assert isinstance(held, QuantizedWeight)
    assert isinstance(held, nn.Parameter)
    assert (held.shape, held.dtype, held.requires_grad) == (SHAPE, torch.bfloat16, False)
    assert held.stored_bytes < weight.numel() * 1.1


def test_one_expert_is_unpacked_alone(weight, caplog):
    dense = weight.dense()
    assert torch.equal(weight[2], dense[2])
    assert torch.equal(weight[-1], dense[-1])
    assert all(map(torch.equal, weight.unbind(0), dense))
    assert "unpacked" not in caplog.text


def test_other_operations_unpack_it_and_say_so(weight, caplog):
    quantized_weight._say_once.cache_clear()
    assert torch.equal(weight.transpose(1, 2) + 1, weight.dense().transpose(1, 2) + 1)
    assert "is unpacked as a whole by aten::transpose" in caplog.text


def test_copies_moves_and_conversions_keep_it_packed(weight):
    module = Holder(weight)
    dense = weight.dense()
    for changed in (copy.deepcopy(module), module.to("cpu"), copy.deepcopy(module).requires_grad_(False)):
        assert isinstance(changed.weight, QuantizedWeight)
        assert torch.equal(changed.weight.dense(), dense)
    wide = copy.deepcopy(module).double().weight
    assert isinstance(wide, QuantizedWeight)
    assert isinstance(wide, nn.Parameter)
    assert wide.dtype == torch.float64
    assert torch.equal(wide.dense().bfloat16(), dense)
    assert all(map(torch.equal, (wide.packed, *wide.scales), (weight.packed, *weight.scales)))
    assert module.to("meta").weight.packed.device.type == "meta"


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_and_loaded(weight, weights_only):
    module, buffer = Holder(weight), io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=weights_only)
    fresh = Holder(QuantizedWeight.of(torch.zeros(SHAPE, dtype=torch.bfloat16), weight.format))
    fresh.load_state_dict(state)
    assert torch.equal(fresh.weight.dense(), weight.dense())
    other = Holder(QuantizedWeight.of(torch.zeros(SHAPE), "mxfp4"))
    with pytest.raises((InputError, RuntimeError), match="cannot be copied to one packed as mxfp4"):
        other.load_state_dict(state)


def test_numbers_are_packed_when_they_are_copied_to_it(weight):
    numbers = torch.randn(SHAPE, dtype=torch.bfloat16)
    weight.copy_(numbers)
    assert torch.equal(weight.dense(), QuantizedWeight.of(numbers, weight.format).dense())


@pytest.mark.parametrize("format", FORMATS)
def test_its_own_numbers_leave_it_as_it_is(format):
    """As DDP copies them when it wraps a model: packed again from 16 bits, scales would be others."""
    weight = QuantizedWeight.of(torch.randn(2, 128, 128), format).to(torch.bfloat16)
    before = [held.clone() for held in (weight.packed, *weight.scales)]
    weight.copy_(weight.dense())
    assert all(map(torch.equal, before, (weight.packed, *weight.scales)))


def test_pythons_own_pickle(weight):
    loaded = pickle.loads(pickle.dumps(Holder(weight))).weight
    assert isinstance(loaded, QuantizedWeight)
    assert torch.equal(loaded.dense(), weight.dense())


@pytest.mark.parametrize("format", FORMATS)
def test_products_of_rewritten_graphs_read_it(format):
    x = torch.randn(10, 64, dtype=torch.float64, requires_grad=True)
    w1, w2 = (QuantizedWeight.of(torch.randn(shape).double(), format) for shape in ((4, 64, 64), (4, 64, 32)))
    index, gates = torch.randint(0, 4, (10, 2)), torch.rand(10, 2)
    static = ("silu", "concat", [], "nk", "nk", False)
    outcomes = []
    for first, second in ((w1, w2), (w1.dense(), w2.dense())):
        y = direct.moe_ffn(x, index, gates, first, None, None, None, second, None, *static)
        outcomes.append((y, torch.autograd.grad(y.sum(), x)[0]))
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected)
    offs = torch.tensor([0, 3, 3, 8, 10], dtype=torch.int32)
    found, expected = (direct.esmm(x, w, None, None, offs, 1, "nk") for w in (w1, w1.dense()))
    torch.testing.assert_close(found, expected)
    compiled = torch.compile(
        lambda x: direct.moe_ffn(x, index, gates, w1, None, None, None, w2, None, *static),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(x), outcomes[0][0])


def test_it_is_frozen_and_its_memory_can_be_set(weight):
    """What torch notes beside a wrapper's packed tensors would count for nothing."""
    holder = Holder(weight)
    held, dense = holder.weight, weight.dense()
    with pytest.raises(InputError, match="train adapters on it"):
        holder.requires_grad_()
    with pytest.raises(InputError, match="modules_to_save"):
        held.requires_grad = True
    held.data = held.data * 2
    torch.testing.assert_close(held.dense(), 2 * dense, rtol=0.02, atol=0.02)
    held.data = QuantizedWeight.of(dense.float(), held.format)
    assert (held.dtype, held.shape) == (torch.float32, SHAPE)
    torch.testing.assert_close(held.dense(), dense.float(), rtol=0.2, atol=0.05)
    assert isinstance(holder.to_empty(device="cpu").weight, QuantizedWeight)
    holder.share_memory()
    assert holder.weight.packed.is_shared()
