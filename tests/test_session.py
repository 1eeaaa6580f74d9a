"""What a session does to a training step: forward untouched, gradients close, geometry back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8hooks
from fp8hooks import Rule
from tests import models


def saved_as(fn, *tensors: Tensor, **settings) -> list[Tensor]:
    """What backward of a custom function gets back for `tensors`, saved in a session that compresses everything."""
    got: list[Tensor] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, *inputs):
            ctx.save_for_backward(*inputs)
            return anchor.clone()

        @staticmethod
        def backward(ctx, grad):
            got.extend(ctx.saved_tensors)
            return (grad, *[None] * len(tensors))

    anchor = torch.zeros(1, requires_grad=True)
    rules = [Rule("fp8_e4m3", op="Function.Probe")]
    with fp8hooks.compress(min_numel=0, rules=rules, **settings):
        out = Probe.apply(anchor, *tensors)
    fn()
    out.sum().backward()
    return got


def nothing() -> None:
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [models.mlp, models.encoder])
def test_forward_is_bit_identical_and_gradients_are_close(make, dtype) -> None:
    model = make().to(dtype)
    x = torch.randn(8, 32, 64, dtype=dtype)
    loss, exact = models.step(model, x)
    compressed_loss, compressed = models.step(model, x, fp8hooks.compress())
    assert torch.equal(loss, compressed_loss)
    assert 0 < models.relative_error(compressed, exact) < 0.05


def test_the_bytes_held_are_about_a_byte_an_element() -> None:
    model, x = models.mlp(), torch.randn(64, 64)
    session = fp8hooks.compress()
    models.step(model, x, session)
    assert session.stats.stored_bytes / session.stats.original_bytes < 0.27
    session = fp8hooks.compress()
    models.step(model.bfloat16(), x.bfloat16(), session)
    assert session.stats.stored_bytes / session.stats.original_bytes < 0.53


CONTIGUOUS = torch.arange(2 * 6 * 4 * 10, dtype=torch.float32).remainder(13).view(2, 6, 4, 10)
GEOMETRIES = {
    "contiguous": CONTIGUOUS,
    "transposed": CONTIGUOUS.transpose(1, 3),
    "channels_last": CONTIGUOUS.to(memory_format=torch.channels_last),
    "chunk": CONTIGUOUS.chunk(2, dim=-1)[1],
    "stepped": CONTIGUOUS[:, ::2],
    "padded rows": torch.zeros(16, 20)[:, :17],
    "expanded": CONTIGUOUS[:, :1].expand(2, 6, 4, 10),
    "expanded front": CONTIGUOUS.expand(3, 2, 6, 4, 10),
    "all expanded": torch.ones(()).expand(64, 64),
    "scalar": torch.tensor(3.0),
    "unit dimensions": CONTIGUOUS[:, :1, :1],
    "overlapping": CONTIGUOUS.flatten().unfold(0, 8, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_shape_strides_dtype_and_device_come_back(name, dtype) -> None:
    tensor = GEOMETRIES[name]
    if dtype is not torch.float32:
        tensor = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype).copy_(tensor)
            if (name not in ("overlapping", "expanded", "expanded front", "all expanded"))
            else tensor.to(dtype)
        )
    (back,) = saved_as(nothing, tensor)
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()
    assert back.dtype == tensor.dtype
    assert back.device == tensor.device
    torch.testing.assert_close(back, tensor, rtol=1 / 16, atol=1e-3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(64, 64, dtype=torch.float64),
        torch.randn(64, 64, dtype=torch.complex64),
        torch.arange(4096),
        torch.randn(64, 64) > 0,
        torch.randn(64, 64).to(torch.float8_e4m3fn),
        nn.Parameter(torch.randn(64, 64)),
        nn.Parameter(torch.randn(64, 64)).t(),
        torch.randn(0, 4),
    ],
    ids=["float64", "complex", "integer", "bool", "float8", "parameter", "transposed parameter", "empty"],
)
def test_what_no_codec_is_for_stays_exact(tensor) -> None:
    (back,) = saved_as(nothing, tensor)
    assert back.dtype == tensor.dtype
    assert (
        torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
        if tensor.dtype == torch.float8_e4m3fn
        else (torch.equal(back, tensor))
    )


def test_small_tensors_stay_exact() -> None:
    x = torch.randn(30, 30, requires_grad=True)
    y = x * 1.0
    session = fp8hooks.compress(min_numel=901)
    with session:
        y.exp()
    assert set(session.stats.by_codec) == {"exact"}
    session = fp8hooks.compress(min_numel=900)
    with session:
        y.exp()
    assert set(session.stats.by_codec) == {"square8"}


def test_weights_and_their_autocast_copies_stay_exact() -> None:
    frozen, trained = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True) * 1
    session = fp8hooks.compress()
    with session, torch.autocast("cpu", torch.bfloat16):
        loss = trained(frozen(x)).sum()
    weights = {site.module: codec for (site, codec) in session.stats.sites if site.role == "weight"}
    assert not weights  # counted apart
    assert session.stats.weight_bytes == 2 * 64 * 64 * 2
    assert set(session.stats.by_role) == {"activation"}
    loss.backward()


def test_backward_may_run_after_many_forwards_and_out_of_order() -> None:
    model = models.mlp()
    batches = [torch.randn(32, 64) for _ in range(3)]
    want = [models.step(model, x, fp8hooks.compress())[1] for x in batches]
    session = fp8hooks.compress()
    losses = []
    for x in batches:
        with session:
            losses.append(model(x).square().mean())
    for i in (1, 2, 0):
        model.zero_grad()
        losses[i].backward()
        for p, grad in zip(model.parameters(), want[i], strict=True):
            assert torch.equal(p.grad, grad)


def test_an_edit_in_place_of_an_exact_tensor_is_an_error_that_names_it() -> None:
    lin = nn.Linear(8, 8)
    with fp8hooks.compress(min_numel=10**6):
        y = lin(torch.randn(4, 8)).exp()
        loss = y.sum()
    y.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*\[4, 8\].*op 'exp'.*version 1; expected version 0"
    ):
        loss.backward()


def test_an_edit_in_place_of_a_compressed_tensor_does_not_matter() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with fp8hooks.compress():
        y = (x * 1).exp()
        loss = y.sum()
    want = y.detach().clone()
    y.detach().zero_()
    loss.backward()
    assert (x.grad - want).norm() < 0.02 * want.norm()


def test_hooks_are_gone_after_an_exception() -> None:
    session = fp8hooks.compress()
    with pytest.raises(ZeroDivisionError), session:
        _ = 1 / 0
    x = torch.randn(64, 64, requires_grad=True)
    x.exp().sum().backward()
    assert session.stats.tensors == 0
    with session:
        x.exp()
    assert session.stats.tensors == 1


def test_payloads_die_with_the_graph() -> None:
    session = fp8hooks.compress()
    x = torch.randn(64, 64, requires_grad=True)
    with session:
        loss = (x * 2).exp().sum()
    assert session.held_bytes == session.stats.by_codec["square8"].stored_bytes > 0
    loss.backward()
    assert session.held_bytes == 0
    with session:
        unused = (x * 2).exp()
    del unused
    assert session.held_bytes == 0


def test_one_payload_for_all_who_save_the_same_memory() -> None:
    x = torch.randn(16, 8, 64) * 1
    q, k, v = (nn.Linear(64, 64) for _ in range(3))
    session = fp8hooks.compress()
    with session:
        q(x) + k(x.view(-1, 64)).view(16, 8, 64) + v(x)
    row = session.stats.by_op["linear"]
    assert row.tensors == 3
    assert row.original_bytes == x.numel() * 4
    assert row.stored_bytes == x.numel() + x.numel() // 64


def test_reports_name_op_role_codec_and_bytes() -> None:
    model, x = models.encoder(), torch.randn(8, 32, 64)
    session = fp8hooks.compress()
    models.step(model, x, session)
    text = str(session.report())
    for word in ("linear", "layer_norm", "attention_qk", "statistic", "square8", "int10", "exact", "KiB"):
        assert word in text
    assert "layers.1.self_attn" in str(session.report(by_module=True))
    data = session.stats.to_dict()
    assert data["stored_bytes"] == sum(bucket["stored_bytes"] for bucket in data["by_role"].values())
    assert data["original_bytes"] == sum(bucket["original_bytes"] for bucket in data["by_codec"].values())
    assert data["original_bytes"] == sum(bucket["original_bytes"] for bucket in data["by_op"].values())


def test_what_the_caller_still_holds_is_reported() -> None:
    lin = nn.Linear(64, 64)
    batch = torch.randn(64, 64)
    session = fp8hooks.compress()
    with session:
        lin(batch)
    assert session.stats.not_freed == {"linear": batch.numel() * 4}
    assert "still held by somebody else" in str(session.report())


def test_the_original_bytes_are_those_that_autograd_holds() -> None:
    """Counted another way: every storage that an identity hook sees, once, without weights."""
    model, x = models.encoder(), torch.randn(8, 32, 64)
    seen = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = (storage.nbytes(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).square().mean()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    want = sum(nbytes for pointer, (nbytes, _) in seen.items() if pointer not in weights)
    del loss
    session = fp8hooks.compress()
    models.step(model, x, session)
    assert session.stats.original_bytes == want


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_same_holds(dtype) -> None:
    model = models.encoder(256).to("cuda", dtype)
    x = torch.randn(16, 128, 256, device="cuda", dtype=dtype)
    loss, exact = models.step(model, x)
    session = fp8hooks.compress()
    compressed_loss, compressed = models.step(model, x, session)
    assert torch.equal(loss, compressed_loss)
    assert models.relative_error(compressed, exact) < 0.05
    assert session.stats.stored_bytes / session.stats.original_bytes < (0.3 if dtype is torch.float32 else 0.55)


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_really_given_back() -> None:
    blocks = nn.Sequential(*[models.mlp(512) for _ in range(6)]).to("cuda", torch.bfloat16)
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)

    def held(session) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if session is None:
            loss = blocks(x).float().square().mean()
        else:
            with session:
                loss = blocks(x).float().square().mean()
        torch.cuda.synchronize()
        grown = torch.cuda.memory_allocated() - before
        loss.backward()
        return grown

    held(None)  # gradients, workspaces
    held(fp8hooks.compress())
    assert held(fp8hooks.compress()) < 0.55 * held(None)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_nothing_is_recorded_no_operation_is_watched(mode) -> None:
    from torch.overrides import _get_current_function_mode_stack as modes

    session = fp8hooks.compress()
    with mode(), session:
        assert not modes()
        torch.randn(64, 64).exp()
    assert not session.stats.tensors
    x = torch.randn(64, 64)
    with torch.no_grad(), session, torch.enable_grad():
        loss = (x.requires_grad_() * 1).exp().sum()
    loss.backward()
    assert session.stats.savings > 0.5
