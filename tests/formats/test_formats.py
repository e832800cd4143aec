"""Packed weights: their formats, read number by number from documented layouts, and as parameters that are kept or unpacked."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from hexa_fx.errors import InputError
from hexa_fx.formats import FORMATS, FP8_BLOCK, INT8_ROWS, MXFP4, NF4, NF4_DOUBLE, format_of, quantized_weight
from hexa_fx.formats.quantized_weight import QuantizedWeight
from hexa_fx.ops import direct

SHAPES = {
    "nf4": (3, 6, 96),  # a block goes on in the next row
    "nf4_double": (2, 160, 128),  # more scales than share one
    "mxfp4": (3, 5, 96),
    "fp8_block": (2, 150, 260),
    "int8_rows": (3, 7, 10),
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def random_codes(f, seed=0):
    """A packed weight of any codes, and scales of every kind that there may be."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[f.name]
    packed = torch.randint(0, 256, f.packed_shape(shape), generator=generator, dtype=torch.uint8)
    if f is FP8_BLOCK:
        packed = packed.masked_fill((packed & 127) == 127, 3)  # NaN
    scales = []
    for wanted, dtype in zip(f.scale_shapes(shape), f.scale_dtypes(), strict=True):
        if dtype == torch.uint8:
            scales.append(torch.randint(100, 150, wanted, generator=generator, dtype=dtype))
        else:
            scales.append(torch.rand(wanted, generator=generator) + 0.1)
    return packed.view(f.dtype), scales


def value_of(f, packed, scales, e, r, c):
    """One element, by the layout's description."""
    columns = SHAPES[f.name][2]
    flat = r * columns + c
    if f in (FP8_BLOCK, INT8_ROWS):
        scale = scales[0][e, r // 128, c // 128] if f is FP8_BLOCK else scales[0][e, r, 0]
        return packed[e, r, c].float() * scale
    byte = int(packed[e].flatten()[flat // 2])
    if f is MXFP4:
        code = byte >> 4 if c % 2 else byte & 15
        return torch.tensor(E2M1[code & 7] * (-1 if code & 8 else 1)) * 2.0 ** (int(scales[0][e, r, c // 32]) - 127)
    code = byte & 15 if c % 2 else byte >> 4
    block = flat // 64
    if f is NF4:
        scale = scales[0][e, block]
    else:
        codes, nested, offset, values = scales
        scale = values[e, int(codes[e, block])] * nested[e, block // 256] + offset[e]
    return torch.tensor(f.values[code]) * scale


@pytest.mark.parametrize("f", FORMATS.values(), ids=lambda f: f.name)
def test_every_element_is_read_as_the_layout_says(f):
    packed, scales = random_codes(f)
    f.check("test", "weight", packed, scales)
    dense = f.dense(packed, scales, torch.float64)
    experts, rows, columns = SHAPES[f.name]
    assert dense.shape == (experts, rows, columns)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        e, r, c = (int(torch.randint(0, n, (), generator=generator)) for n in (experts, rows, columns))
        assert dense[e, r, c] == value_of(f, packed, scales, e, r, c).double()


@pytest.mark.parametrize("f", FORMATS.values(), ids=lambda f: f.name)
def test_rows_read_alone_are_those_of_the_matrix(f):
    packed, scales = random_codes(f)
    rows = SHAPES[f.name][1]
    whole = f.expert(packed, scales, 1, torch.bfloat16)
    for begin, end in ((0, 1), (1, rows), (2, 4), (rows - 1, rows), (3, 3)):
        found = f.read(packed, scales, 1, slice(begin, end), torch.bfloat16)
        assert torch.equal(found, whole[begin:end])


@pytest.mark.parametrize("f", FORMATS.values(), ids=lambda f: f.name)
def test_packing_takes_the_nearest_value(f):
    """No element is further off than half a step at its size, and what is representable is kept."""
    weight = torch.randn(SHAPES[f.name])
    weight[0, 1] = 0
    packed, *scales = f.pack_all(weight)
    f.check("test", "weight", packed, scales)
    found = f.dense(packed, scales, torch.float32)
    limit = {"nf4": 0.16, "nf4_double": 0.17, "mxfp4": 0.34, "fp8_block": 0.07, "int8_rows": 0.005}[f.name]
    assert (found - weight).abs().max() <= limit * weight.abs().max()
    assert (found[0, 1].abs() <= 1e-2).all()
    again, *_ = f.pack_all(found)
    assert (f.dense(again, scales, torch.float32) - found).norm() <= 1e-2 * found.norm()


def test_powers_of_two_and_their_nan():
    """Every exponent of E8M0: 2^(s - 127); 255 is NaN."""
    packed = torch.full((1, 256, 16), 0x22, dtype=torch.uint8)  # 1.0
    dense = MXFP4.dense(packed, [torch.arange(256, dtype=torch.uint8).view(1, 256, 1)], torch.float32)[0, :, 0]
    assert dense[:255].tolist() == [2.0 ** (s - 127) for s in range(255)]
    assert math.isnan(dense[255])


def test_blocks_of_zeros_and_of_large_numbers_become_themselves():
    for f in FORMATS.values():
        for number in (0.0, 1e4):
            packed, *scales = f.pack_all(torch.full(SHAPES[f.name], number))
            found = f.dense(packed, scales, torch.float32)
            torch.testing.assert_close(found, torch.full_like(found, number), rtol=0.2, atol=0)


def test_what_does_not_fit_is_said():
    with pytest.raises(InputError, match="no multiple of 32"):
        MXFP4.pack_all(torch.zeros(2, 4, 40))
    with pytest.raises(InputError, match="blocks of 64"):
        NF4.pack_all(torch.zeros(2, 3, 6))
    packed, scales = random_codes(NF4)
    with pytest.raises(InputError, match="absmax of weight"):
        NF4.check("test", "weight", packed, [scales[0][:, :-1]])
    with pytest.raises(InputError, match="2 scale tensors"):
        NF4.check("test", "weight", packed, scales * 2)
    with pytest.raises(InputError, match="is stored as"):
        NF4.check("test", "weight", packed.int(), scales)
    with pytest.raises(InputError, match="expected one of nf4"):
        format_of("int3")


def test_mxfp4_as_transformers_reads_it():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed, (exponents,) = random_codes(MXFP4)
    experts, rows, columns = SHAPES["mxfp4"]
    blocks = packed.view(experts, rows, columns // 32, 16)
    expected = mxfp4.convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)
    assert torch.equal(MXFP4.dense(packed, [exponents], torch.bfloat16), expected.transpose(1, 2))


def test_nf4_as_bitsandbytes_reads_and_packs_it():
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(160, 128)
    for f in (NF4, NF4_DOUBLE):
        double = f is NF4_DOUBLE
        theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        scales = [state.absmax[None]]
        if double:
            scales += [state.state2.absmax[None], state.offset.view(1), state.state2.code.view(1, 256)]
        ours = theirs.view(1, 160, 64)
        expected = functional.dequantize_4bit(theirs, state)
        torch.testing.assert_close(f.expert(ours, scales, 0, torch.float32), expected, rtol=1e-6, atol=1e-7)
        packed, *own = f.pack(weight)
        found = f.expert(packed[None], [scale[None] for scale in own], 0, torch.float32)
        assert (found - expected).norm() <= 1e-2 * expected.norm()
        assert (packed != ours[0]).float().mean() < 1e-2


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
