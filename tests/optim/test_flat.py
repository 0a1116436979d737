from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from redline.optim.flat import ALIGNMENT, FlatBuffers

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def make_parameters(shapes, dtypes=(torch.float32,), frozen=()):
    generator = torch.Generator().manual_seed(0)
    return {
        f"p{i}": nn.Parameter(
            torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]), requires_grad=i not in frozen
        )
        for i, shape in enumerate(shapes)
    }


def padding_of(buffers: FlatBuffers, kind) -> Tensor:
    """All elements of a kind's flat buffers that belong to no parameter."""
    pieces = []
    for buffer in buffers.buffers:
        if kind in buffer.tensors:
            mask = torch.ones(buffer.tensors[kind].numel(), dtype=torch.bool)
            for slot in buffer.slots:
                mask[slot.start : slot.end] = False
            pieces.append(buffer.tensors[kind].cpu()[mask].double())
    return torch.cat(pieces)


class WgradLinear(torch.autograd.Function):
    """A GEMM site in small: accumulates into main_grad itself and returns None for the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.main_grad.add_(dy.T @ x)
        return dy @ weight, None


@settings(derandomize=True, max_examples=40, deadline=None)
@given(shapes=SHAPES, dtypes=st.lists(DTYPES, min_size=1, max_size=3), meta=st.booleans(), data=st.data())
def test_layout(device, shapes, dtypes, meta, data):
    frozen = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    parameters = make_parameters(shapes, dtypes, frozen)
    values = {name: param.detach().clone() for name, param in parameters.items()}
    if meta:
        parameters = {
            name: nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            for name, param in parameters.items()
        }
        values = {name: torch.zeros_like(value) for name, value in values.items()}
    buffers = FlatBuffers(
        parameters.items(),
        main_dtype=torch.float32,
        grad_dtype=torch.bfloat16,
        exp_avg_dtype=torch.float16,
        device=device,
    )

    assert list(buffers.views("param")) == list(parameters), "views are in registration order"
    for name, param in parameters.items():
        assert param.device.type == device
        assert torch.equal(param.detach().cpu(), values[name])
        assert torch.equal(buffers.views("main_param")[name].cpu().float(), values[name].float())
        assert buffers.views("param")[name].data_ptr() == param.data_ptr()
        if param.requires_grad:
            assert buffers.views("main_grad")[name].data_ptr() == param.main_grad.data_ptr()
            assert param.main_grad.shape == param.shape and param.main_grad.dtype == torch.bfloat16
        else:
            assert not hasattr(param, "main_grad")
    order = [slot.name for buffer in buffers.buffers for slot in buffer.slots]
    for buffer in buffers.buffers:
        names = [slot.name for slot in buffer.slots]
        assert names == [name for name in reversed(parameters) if name in names]
        assert len({parameters[name].dtype for name in names}) == 1
        starts = [slot.start for slot in buffer.slots]
        assert all(start % ALIGNMENT == 0 for start in starts)
        assert all(slot.end <= start for slot, start in zip(buffer.slots, starts[1:], strict=False))
    assert sorted(order) == sorted(parameters)

    trainable = [name for name in parameters if parameters[name].requires_grad]
    for kind, dtype in [
        ("main_grad", torch.bfloat16),
        ("exp_avg", torch.float16),
        ("exp_avg_sq", torch.float32),
    ]:
        views = buffers.views(kind)
        assert list(views) == trainable
        assert all(view.dtype == dtype and not view.any() for view in views.values())


def test_main_param_shares_storage_only_where_dtypes_agree():
    parameters = make_parameters([(3, 5), (7,)], (torch.float32, torch.bfloat16))
    buffers = FlatBuffers(
        parameters.items(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu"
    )
    main = buffers.views("main_param")
    assert main["p0"].data_ptr() == parameters["p0"].data_ptr()
    assert main["p1"].data_ptr() != parameters["p1"].data_ptr() and main["p1"].dtype == torch.float32


def test_sync_params_rounds_and_sync_main_params_widens():
    parameters = make_parameters([(3, 5)], (torch.bfloat16,))
    buffers = FlatBuffers(
        parameters.items(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu"
    )
    main = buffers.views("main_param")["p0"]
    main.fill_(1 + 2**-10)  # not a bf16 number
    buffers.sync_params()
    assert torch.equal(parameters["p0"].detach(), torch.ones(3, 5, dtype=torch.bfloat16))
    with torch.no_grad():
        parameters["p0"].fill_(3.0)
    buffers.sync_main_params()
    assert torch.equal(main, torch.full((3, 5), 3.0))


def test_meta_parameter_keeps_object_attributes_and_place():
    module = nn.Linear(4, 3, device="meta")
    weight = module.weight
    weight.mark = "kept"
    FlatBuffers(module.named_parameters(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu")
    assert module.weight is weight and weight.mark == "kept" and isinstance(weight, nn.Parameter)
    assert weight.requires_grad and not weight.is_meta
    module(torch.ones(2, 4)).sum().backward()
    assert torch.equal(weight.main_grad, torch.full((3, 4), 2.0)) and weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_reach_main_grad_by_hook_and_by_site(device, dtype):
    """Two microbatches, both forwards in flight; the GEMM weight returns None, the bias a gradient."""
    generator = torch.Generator().manual_seed(1)
    main_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    parameters = make_parameters([(3, 5), (3,), (2, 2)], (dtype,))
    buffers = FlatBuffers(parameters.items(), main_dtype=main_dtype, grad_dtype=main_dtype, device=device)
    weight, bias, unused = parameters.values()
    inputs = [torch.randn(4, 5, generator=generator).to(device, dtype) for _ in range(2)]
    upstream = [torch.randn(4, 3, generator=generator).to(device, dtype) for _ in range(2)]
    losses = [
        ((WgradLinear.apply(x, weight) + bias) * dy).sum() for x, dy in zip(inputs, upstream, strict=True)
    ]
    for loss in losses:
        loss.backward()

    wgrad = sum((dy.T @ x).to(main_dtype) for x, dy in zip(inputs, upstream, strict=True))
    # The bias gradient of each microbatch is one sum over 4 rows in `dtype`: exact to a few roundings of it.
    tolerance = 8 * torch.finfo(dtype).eps
    bgrad = sum(dy.to(main_dtype).sum(0) for dy in upstream)
    assert torch.equal(weight.main_grad, wgrad)
    assert torch.allclose(bias.main_grad, bgrad, rtol=tolerance, atol=tolerance)
    assert not unused.main_grad.any()
    assert weight.grad is None and bias.grad is None
    assert not padding_of(buffers, "main_grad").any()

    pointer = weight.main_grad.data_ptr()
    buffers.zero_grad()
    assert not any(flat.any() for flat in buffers.flat("main_grad"))
    assert weight.main_grad.data_ptr() == pointer


def test_main_grad_keeps_what_bf16_would_lose():
    """256 + 1 is 256 in bf16; two hundred such additions reach 456 in an fp32 main_grad."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    FlatBuffers([("p", param)], main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu")
    (param * 256).sum().backward()
    for _ in range(200):
        param.sum().backward()
    assert param.main_grad.item() == 456.0


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_b052_tied_parameters_are_one(meta, remove_duplicate):
    """B052: head and embedding stay one parameter, by object and by storage."""
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    if meta:
        model = model.to("meta")
        model["head"].weight = model["embedding"].weight
    buffers = FlatBuffers(
        model.named_parameters(remove_duplicate=remove_duplicate),
        main_dtype=torch.float32,
        grad_dtype=torch.float32,
        device="cpu",
    )
    assert list(buffers.views("main_param")) == ["embedding.weight"]
    assert model["head"].weight is model["embedding"].weight
    tokens = torch.tensor([1, 3])
    model["head"](model["embedding"](tokens)).sum().backward()
    weight = model["embedding"].weight.detach()
    expected = weight[tokens].sum(0).expand(7, 5).clone()  # through the head
    expected[tokens] += weight.sum(0)  # through the embedding
    assert torch.allclose(model["head"].weight.main_grad, expected, atol=1e-6)


def test_no_parameters_and_empty_parameters():
    assert FlatBuffers([], main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu").buffers == ()
    parameters = {"empty": nn.Parameter(torch.zeros(0, 3)), "one": nn.Parameter(torch.ones(()))}
    buffers = FlatBuffers(
        parameters.items(), main_dtype=torch.float32, grad_dtype=torch.float32, device="cpu"
    )
    assert buffers.views("main_param")["empty"].shape == (0, 3)
    assert buffers.views("main_param")["one"].item() == 1.0
