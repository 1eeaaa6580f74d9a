"""Other frameworks' own loops, with the real libraries: training goes as without, and the session has seen it."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import fp8hooks
from tests import models

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")


def tokens(batch: int = 8, length: int = 64) -> torch.Tensor:
    return torch.randint(3, 512, (batch, length), generator=torch.Generator().manual_seed(0))


def llama(**settings) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            **settings,
        )
    )  # fmt: skip


def apart(got: nn.Module, want: nn.Module, start: nn.Module) -> float:
    """How far two trainings ended from each other, of the way that they went."""
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (got, want, start)]
    return float((flat[0] - flat[1]).norm() / (flat[1] - flat[2]).norm())


# transformers


def train_by_trainer(tmp_path, callbacks, **settings) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    model, data = llama(), [{"input_ids": row, "labels": row} for row in tokens(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
        save_strategy="no", use_cpu=True, optim="sgd", disable_tqdm=True, **settings,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    return model


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_the_trainers_callback(tmp_path, settings) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from fp8hooks.integrations.transformers import CompressCallback

    callback = CompressCallback(memory_savings=0.6)
    got = train_by_trainer(tmp_path, [callback], **settings)
    want = train_by_trainer(tmp_path, [], **settings)
    assert callback.session.stats.steps == 4 * settings.get("gradient_accumulation_steps", 1)
    assert 0.55 < callback.session.stats.savings < 0.7
    assert apart(got, want, llama()) < 0.05
    assert fp8hooks.sessions(got) == {}
    assert "forward" not in got.__dict__ or not isinstance(got.forward, fp8hooks.wrapping.Compressed)


def test_the_trainers_callback_and_checkpointing_exclude_each_other(tmp_path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from fp8hooks.integrations.transformers import CompressCallback

    with pytest.raises(ValueError, match="gradient_checkpointing: True given beside CompressCallback"):
        train_by_trainer(tmp_path, [CompressCallback()], gradient_checkpointing=True)
    with pytest.raises(ValueError, match="memory_savings: 3"):
        CompressCallback(memory_savings=3)


def test_after_an_error_a_model_can_be_trained_again(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from fp8hooks.integrations.transformers import CompressCallback

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyError("stop")

    model = llama()
    for callback in (CompressCallback(), CompressCallback()):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
        )
        data = [{"input_ids": row, "labels": row} for row in tokens(8)]
        with pytest.raises(KeyError, match="stop"):
            transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback, Stop()]).train()
        assert callback.session.stats.savings > 0.5


def test_a_layer_of_transformers_that_is_checkpointed_is_refused() -> None:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(ValueError, match="LlamaDecoderLayer is checkpointed already"):
        fp8hooks.compress_wrapper(model.model.layers[0])


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    ends = []
    for enabled in (True, False):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        if enabled:
            session = fp8hooks.enable(accelerator.unwrap_model(model, keep_fp32_wrapper=True), memory_savings=0.5)
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens(), labels=tokens()).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        ends.append(model)
    assert apart(ends[0], ends[1], llama()) < 0.05
    assert 0.45 < session.stats.savings < 0.6
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_lora() -> None:
    """Weights are frozen: most of what is saved is for the few that are not."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    keys = list(model.state_dict())

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    want = gradients()
    session = fp8hooks.enable(model)
    assert models.relative_error(gradients(), want) < 0.02
    assert session.stats.savings > 0.5
    assert list(model.state_dict()) == keys
    assert all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)


# Lightning


def fit(callbacks, strategy="auto", **settings) -> nn.Module:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(models.Block(), models.Block())

        def training_step(self, x, index):
            return self.body(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.randn(4 * 128, 64, generator=torch.Generator().manual_seed(0))
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=4, callbacks=callbacks, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=128))
    return model


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.01}])
def test_lightnings_callback(settings) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from fp8hooks.integrations.lightning import CompressCallback

    callback = CompressCallback(memory_savings=0.5)
    got, want = fit([callback], **settings), fit([], **settings)
    assert callback.session.stats.steps == 4
    assert 0.48 < callback.session.stats.savings < 0.6
    assert {site.op for site, _ in callback.session.stats.sites} >= {"linear", "square", "mean"} - {"mean"}
    start = fit([], limit_train_batches=0)
    assert apart(got, want, start) < 0.05
    assert fp8hooks.sessions(got) == {}


def test_lightnings_callback_under_a_strategy_that_is_not_supported() -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies", reason="lightning is not installed")
    from fp8hooks.integrations.lightning import CompressCallback

    class Unheard(strategies.Strategy):
        all_gather = barrier = broadcast = is_global_zero = model_to_device = reduce = root_device = None

        def __init__(self):
            pass

        def teardown(self):
            pass

    class Trainer:
        strategy = Unheard()

    with pytest.raises(ValueError, match="strategy: Unheard given, SingleDeviceStrategy, DDPStrategy"):
        CompressCallback().on_fit_start(Trainer(), nn.Linear(2, 2))


def test_lightnings_callback_leaves_nothing_after_an_error() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from fp8hooks.integrations.lightning import CompressCallback

    seen = []

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            seen.append(module)
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fit([CompressCallback(), Stop()])
    assert fp8hooks.sessions(seen[0]) == {}


# torchtitan


def test_torchtitans_policy() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.models.llama3 import model_registry

    from fp8hooks.integrations.torchtitan import CompressedAC

    model = model_registry("debugmodel", attn_backend="flex").model.build()
    names = dict(model.named_parameters()).keys()
    policy = CompressedAC.Config(memory_savings=0.5, format="int8").build()
    policy.apply(model)
    assert fp8hooks.sessions(model) == {"": policy.session}
    assert policy.session.config.memory_savings == 0.5
    assert policy.session.config.format == "int8"
    assert dict(model.named_parameters()).keys() == names
    assert CompressedAC.Config().to_dict()["format"] == "square8"
    with pytest.raises(ValueError, match="enabled already"):
        policy.apply(model)
    with pytest.raises(ValueError, match="memory_savings: 2"):
        CompressedAC.Config(memory_savings=2).build().apply(nn.Linear(2, 2))
    # Attention is FlexAttention, which does not train on a CPU; one layer's other half does.
    half = next(iter(model.layers.children())).feed_forward
    for parameter in half.parameters():
        nn.init.normal_(parameter, std=0.05)
    CompressedAC.Config().build().apply(half)
    width = next(half.parameters()).shape[1]
    half(torch.randn(256, width, requires_grad=True)).sum().backward()
    assert fp8hooks.sessions(half)[""].stats.savings > 0.5
