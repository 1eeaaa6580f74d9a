"""TransformerEngine itself: its modules under its recipes, as they are, in CUDA graphs and over microbatches."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8hooks
from fp8hooks.bench.te import RECIPES, recipe_context
from tests import models

te = pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
pytestmark = pytest.mark.gpu

HIDDEN, FFN, HEADS, LENGTH, BATCH = 512, 1536, 8, 256, 2
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
OP = {"dtype": torch.bfloat16, "device": "cuda"}


class Attention(nn.Module):
    """q, k and v in one buffer, as fused projections give them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.Linear(HIDDEN, 2 * HIDDEN, bias=False, **BF16)
        width = HIDDEN // HEADS
        self.attention = te.DotProductAttention(
            HEADS, width, num_gqa_groups=HEADS // 2, attention_dropout=0.0, attn_mask_type="causal"
        )

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (2 * HEADS, HIDDEN // HEADS))
        q, k, v = fused.split((HEADS, HEADS // 2, HEADS // 2), dim=-2)
        return self.attention(q, k, v)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(2, HIDDEN, FFN, **BF16)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        rows = x.flatten(0, 1)
        return self.experts(rows, [len(rows) // 2] * 2, **kwargs)


def layer(**kwargs: Any) -> nn.Module:
    return te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        num_gqa_groups=HEADS // 2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        self_attn_mask_type="causal",
        **BF16,
        **kwargs,
    )


MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, FFN, **BF16, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, FFN, **BF16, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, FFN, **BF16, **kw),
    "DotProductAttention": lambda **kw: Attention(**kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=True, fuse_qkv_params=True, **BF16, **kw
    ),
    "TransformerLayer": layer,
    "GroupedLinear": lambda **kw: Experts(**kw),
    "ops": lambda **kw: te.ops.Sequential(
        te.ops.LayerNorm(HIDDEN, **OP),
        te.ops.Linear(HIDDEN, 2 * FFN, **OP),
        te.ops.SwiGLU(),
        te.ops.Linear(FFN, HIDDEN, **OP),
    ),
}
#: With projections and norms in BF16 these save hardly anything but FP8 under an FP8 recipe.
ALL_FP8 = {"Linear", "GroupedLinear"}


def build(name: str, **kwargs: Any) -> nn.Module:
    """A module behind another operation, so that its input is no leaf; the same weights each time."""
    torch.manual_seed(0)
    return MODULES[name](**kwargs)


def leaf() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(LENGTH, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()


def step(
    model: nn.Module,
    x: Tensor,
    context: Any,
    session: Any = None,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """What one forward gives (in the session, if given), and the gradients of its backward."""
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    with context(), session or contextlib.nullcontext():
        output = (call or model)(x * 1, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    output.float().square().mean().mul(1e3).backward()
    return output.detach(), [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]


def amax_histories(model: nn.Module) -> list[Tensor]:
    """Of forward's tensors, under delayed scaling."""
    found = []
    for module in model.modules():
        states = getattr(module, "fp8_meta", {})
        if "scaling_fwd" in states and hasattr(states["scaling_fwd"], "amax_history"):
            found += [states["scaling_fwd"].amax_history.clone(), states["scaling_fwd"].scale.clone()]
    return found


@pytest.fixture(scope="module", autouse=True)
def _libraries_have_their_workspaces() -> None:
    step(build("TransformerLayer"), leaf(), recipe_context("delayed"))


_allocated: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_is_left_of_the_test_before() -> None:
    gc.collect()
    torch.cuda.synchronize()
    now = torch.cuda.memory_allocated()
    _allocated.append(now)
    # Libraries may take more for themselves when something is called first; the smallest tensor here has 0.5 MiB.
    assert now <= _allocated[0] + 2**26, "the test before left memory behind"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_and_leaks_nothing(name: str, recipe: str) -> None:
    context, x = recipe_context(recipe), leaf()
    plain, ours, session = build(name), build(name), fp8hooks.compress()
    held = []
    for _ in range(4):
        want, exact = step(plain, x, context)
        got, close = step(ours, x, context, session)
        assert torch.equal(got, want)
        assert models.relative_error(close, exact) < 0.03
        histories = zip(amax_histories(ours), amax_histories(plain), strict=True)
        assert all(torch.equal(a, b) for a, b in histories)
        del want, exact, got, close, histories
        held.append(torch.cuda.memory_allocated())
        assert session.held_bytes == 0
    assert held[1] == held[-1]
    if recipe == "bf16":
        assert session.stats.savings > 0.4
    elif name not in ALL_FP8:
        assert session.stats.savings > 0.15
    assert {site.role for site, codec in session.stats.sites if codec != "exact"} <= {
        "activation",
        "attention_qk",
        "attention_vo",
    }
    assert not any(site.op.startswith("Function.") and site.role == "weight" for site, _ in session.stats.sites)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "bf16"])
def test_weights_in_fp8_are_not_counted(recipe: str) -> None:
    model, session = build("TransformerLayer"), fp8hooks.compress()
    step(model, leaf(), recipe_context(recipe), session)
    weights = sum(p.nbytes for p in model.parameters())
    copies = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)  # by rows and by columns
    assert weights + copies <= session.stats.weight_bytes <= weights + 1.1 * copies


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("GroupedLinear",)])
def test_in_cuda_graphs(name: str, recipe: str) -> None:
    def graph(model: nn.Module, session: Any = None) -> Callable[..., Any]:
        with session or contextlib.nullcontext():
            settings = (
                {} if recipe == "bf16" else {"enabled": True, "recipe": recipe_context(recipe).keywords["recipe"]}
            )
            return te.make_graphed_callables(model, (leaf(),), **settings)

    context, x = recipe_context(recipe), leaf()
    plain, ours, session = build(name), build(name), fp8hooks.compress()
    want_call = graph(plain)
    got_call = graph(ours, session)
    assert session.stats.tensors > 0
    if recipe == "bf16":
        assert session.stats.savings > 0.4
    for _ in range(2):
        want, exact = step(plain, x, context, call=want_call)
        got, close = step(ours, x, context, call=got_call)
        assert torch.equal(got, want)
        assert models.relative_error(close, exact) < 0.03


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer",
                                  "GroupedLinear"])  # fmt: skip
def test_microbatches_accumulate_in_main_grad(name: str, recipe: str) -> None:
    """Weights' copies in FP8 are made once and used again; gradients are added where Megatron wants them."""
    context, session = recipe_context(recipe), fp8hooks.compress()

    def accumulated(compressed: bool) -> list[Tensor]:
        model = build("GroupedLinear") if name == "GroupedLinear" else build(name, fuse_wgrad_accumulation=True)
        if name == "GroupedLinear":
            model.experts = te.GroupedLinear(2, HIDDEN, FFN, fuse_wgrad_accumulation=True, **BF16)
            torch.manual_seed(0)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.02)
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
        for number in range(3):
            x = (leaf().detach() * (1 + number)).requires_grad_()
            step(model, x, context, session if compressed else None, is_first_microbatch=number == 0)
        assert any(p.grad_added_to_main_grad for p in model.parameters())
        return [p.main_grad for p in model.parameters() if p.dim() == 2]

    want, got = accumulated(False), accumulated(True)
    assert all(t.any() for t in want)
    assert models.relative_error(got, want) < 0.03


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_casts_under_autocast(recipe: str) -> None:
    def mixed() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        stack.enter_context(recipe_context(recipe)())
        return stack

    torch.manual_seed(0)
    model = te.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.float32, device="cuda")
    session, x = fp8hooks.compress(), leaf().detach().float().requires_grad_()
    want, exact = step(model, x, mixed)
    got, close = step(model, x, mixed, session)
    assert torch.equal(got, want)
    assert models.relative_error(close, exact) < 0.03
    assert session.stats.savings > 0.2
    assert session.stats.weight_bytes > sum(p.nbytes for p in model.parameters())


def test_what_started_it() -> None:
    """Torch's checkpoint fails, or leaves FP8 without a word; in a session the same layer trains."""
    context = recipe_context("delayed")
    model, x = build("TransformerLayer"), leaf()
    with pytest.raises(Exception, match=r"different number of tensors was saved|early stop"):
        step(model, x, context, call=lambda h: checkpoint(model, h, use_reentrant=False))

    dtypes: list[set[torch.dtype]] = []

    def saves(tensor: Tensor) -> Tensor:
        dtypes[-1].add(tensor.dtype)
        return tensor

    def recomputed(h: Tensor) -> Tensor:
        dtypes.append(set())
        with torch.autograd.graph.saved_tensors_hooks(saves, lambda t: t):
            return model(h)

    step(build("TransformerLayer"), x, context, call=lambda h: checkpoint(recomputed, h, use_reentrant=True))
    assert len(dtypes) == 2
    assert torch.uint8 not in dtypes[1], "TransformerEngine's checkpoint has learnt to recompute in FP8"

    session = fp8hooks.compress()
    plain = build("TransformerLayer")
    model = build("TransformerLayer")
    want, exact = step(plain, x, context)
    got, close = step(model, x, context, session)
    assert torch.equal(got, want)
    assert models.relative_error(close, exact) < 0.03
    assert session.stats.savings > 0.3


def test_its_checkpoint_inside_a_session() -> None:
    context, x = recipe_context("delayed"), leaf()
    plain, ours = build("TransformerLayer"), build("TransformerLayer")
    want, exact = step(plain, x, context, call=lambda h: te.checkpoint(plain, h))
    got, close = step(ours, x, context, fp8hooks.compress(), call=lambda h: te.checkpoint(ours, h))
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(close, exact, strict=True))


def test_its_offload_beside_us() -> None:
    """Its hooks lie inside ours: what it takes it keeps, and the report says whose it was."""
    context, x = recipe_context("delayed"), leaf()

    def offloading(stack: list[nn.Module]) -> Callable[[Tensor], Tensor]:
        offload, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=len(stack))

        def run(h: Tensor) -> Tensor:
            for part in stack:
                with offload:
                    h = part(h)
                h = synchronize(h)
            return h * h.sigmoid()

        return run

    torch.manual_seed(0)
    stack = nn.ModuleList(layer() for _ in range(3))
    session = fp8hooks.compress()
    want, exact = step(stack, x, context, call=offloading(list(stack)))
    got, close = step(stack, x, context, session, call=offloading(list(stack)))
    assert models.relative_error([got], [want]) < 0.02  # scales have moved between the two
    assert models.relative_error(close, exact) < 0.05
    assert any("other hooks inside the session, by transformer_engine" in note for note in session.stats.notes)
    assert any(codec != "exact" for _, codec in session.stats.sites)  # the gate behind the layers is ours


def _storages() -> dict[str, Callable[[Tensor], Any]]:
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    def raw(*shape: int) -> Tensor:
        return torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")

    def mxfp8(x: Tensor) -> Any:
        rows, width = x.shape
        scales = raw(rows, width // 32), raw(rows // 32, width)
        return MXFP8TensorStorage(
            rowwise_data=raw(rows, width), rowwise_scale_inv=scales[0], columnwise_data=raw(rows, width),
            columnwise_scale_inv=scales[1], fp8_dtype=DType.kFloat8E4M3, quantizer=None,
            with_gemm_swizzled_scales=False,
        )  # fmt: skip

    def nvfp4(x: Tensor) -> Any:
        rows, width = x.shape
        amax = torch.ones(1, device="cuda")
        return NVFP4TensorStorage(
            rowwise_data=raw(rows, width // 2), rowwise_scale_inv=raw(rows, width // 16),
            columnwise_data=raw(width, rows // 2), columnwise_scale_inv=raw(width, rows // 16), amax_rowwise=amax,
            amax_columnwise=amax, fp4_dtype=DType.kFloat4E2M1, quantizer=None, with_gemm_swizzled_scales=False,
        )  # fmt: skip

    return {"MXFP8": mxfp8, "NVFP4": nvfp4}


@pytest.mark.parametrize("kind", ["MXFP8", "NVFP4"])
def test_formats_of_blackwell_pass_as_they_are(kind: str) -> None:
    """No kernel of theirs runs here: their classes are saved and restored as their modules do it."""
    from transformer_engine.pytorch.quantized_tensor import prepare_for_saving, restore_from_saved

    make = _storages()[kind]
    before: list[dict[str, Tensor]] = []

    class _Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight: Tensor, x: Tensor) -> Tensor:
            stored = [make(t) for t in (x, weight)]
            before.extend({k: v.clone() for k, v in vars(s).items() if isinstance(v, Tensor)} for s in stored)
            tensors, ctx.objects = prepare_for_saving(stored[0], weight, stored[1])
            ctx.save_for_backward(*tensors)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
            found = restore_from_saved(ctx.objects, ctx.saved_tensors)
            for stored, want in zip((found[0], found[2]), before, strict=True):
                for name, tensor in want.items():
                    assert torch.equal(getattr(stored, name), tensor)
            return gradient.t() @ gradient[:, :1].expand(-1, HIDDEN), gradient @ found[1]

    _Linear.__module__ = "transformer_engine.pytorch.module.linear"
    weight = nn.Parameter(torch.randn(FFN, HIDDEN, device="cuda", dtype=torch.bfloat16))
    x = leaf().detach().flatten(0, 1).requires_grad_()
    session = fp8hooks.compress()
    with session:
        out = _Linear.apply(weight, x * 1)
    out.sum().backward()
    assert {codec for _, codec in session.stats.sites} == {"exact"}
    elements = weight.numel()
    assert session.stats.weight_bytes > elements * 2 + elements
    assert session.stats.original_bytes < 2.5 * x.numel()


def test_the_example_runs() -> None:
    root = Path(__file__).parents[1]
    example = root / "fp8hooks" / "examples" / "te_fsdp2.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(example)]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--steps", "3", "--size", "small"], capture_output=True, text=True, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "te.LayerNormMLP" in done.stdout
