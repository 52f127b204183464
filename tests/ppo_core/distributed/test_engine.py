"""The engine in one process, and what it refuses; test_choose_sharding has several processes."""

import pytest
import torch
from torch import nn

from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.distributed.deepspeed_settings import fill_settings
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, TrainingError
from tests.helpers.models.tiny import make_policy
from tests.ppo_core.distributed.test_choose_sharding import Run


def test_one_process_gets_the_same_objects_back():
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine()
    assert engine.prepare(module, optimizer) == (module, optimizer)
    assert engine.unwrap(module) is module
    assert engine.prepare_frozen(module) is module
    assert not module.training
    assert not engine.is_deepspeed


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_as_they_are(spoiled):
    engine, module = Engine(), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine.backward(module(torch.ones(1, 2)).sum())
    assert engine.step(module, optimizer, 1.0) == pytest.approx(3**0.5)
    before = {name: w.clone() for name, w in module.state_dict().items()}
    moment = optimizer.state[module.weight]["exp_avg"].clone()
    engine.backward(module(torch.ones(1, 2)).sum() * spoiled)
    assert not engine.step(module, optimizer, 1.0).isfinite()
    assert all(torch.equal(before[name], w) for name, w in module.state_dict().items())
    assert torch.equal(moment, optimizer.state[module.weight]["exp_avg"])
    assert module.weight.grad is None


def test_bf16_computes_in_bfloat16_and_keeps_the_weights_in_fp32():
    engine = Engine(bf16=True)
    run = Run(engine)
    seen = []
    layer = run.policy.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    run.learn()
    with engine.autocast():
        run.policy.model(torch.tensor([[3, 4]]))
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in run.module.parameters()} == {torch.float32}
    plain = Run(Engine())
    layer = plain.policy.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    plain.step(8)
    assert seen[-1] == torch.float32


def test_a_full_state_dict_is_a_copy_in_which_tied_weights_stay_tied():
    model = make_policy("gpt2")
    weights = Engine().full_state_dict(model)
    embeddings = weights["transformer.wte.weight"]
    assert weights["lm_head.weight"] is embeddings
    assert embeddings.data_ptr() != model.transformer.wte.weight.data_ptr()
    assert weights.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": {"enabled": True}}, r"fp16.enabled=True in 'zero.json' .* bf16=True"),
        ({"bf16": {"enabled": True}}, "bf16.enabled=True"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer=.* Set learning_rate"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler=.* Set lr_scheduler_type"),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5 .* max_grad_norm"),
        ({"train_batch_size": 64}, "train_batch_size=64 .* per_device_train_batch_size"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu=4"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"fp16": True}, "fp16=True in 'zero.json' is not a JSON object"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device='nvme' .* checkpoints .* Set cpu",
        ),
        ({"zero_optimization": {"compute_grad_norm": False}}, "compute_grad_norm=False .* norm"),
        ({"zero_force_ds_cpu_optimizer": True}, "cpu_optimizer=True .* compiled.* Remove it"),
        ({"managed_gradient_accumulation": False}, "accumulation=False .* last microbatch"),
        ({"zero_optimization": {"stage": 4}}, "stage=4 in 'zero.json' is not a ZeRO stage"),
        ({"zero_optimization": {"stage": "2"}}, "stage='2' in 'zero.json' is not a ZeRO stage"),
    ],
)
def test_deepspeed_settings_that_the_trainer_sets_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        fill_settings(settings, "'zero.json'")


def test_automatic_deepspeed_settings_are_filled():
    settings = {
        "fp16": {"enabled": "auto"},
        "bf16": "auto",
        "optimizer": None,
        "gradient_clipping": "auto",
        "train_batch_size": 1,
        "managed_gradient_accumulation": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": None},
    }
    fill_settings(settings, "'zero.json'")
    assert settings == {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "gradient_clipping": 0.0,
        "train_batch_size": 1,
        "managed_gradient_accumulation": True,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "Expecting property name"), ("[]", "not a JSON object")],
)
def test_a_deepspeed_file_that_cannot_be_read_is_refused(tmp_path, content, message):
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        choose_engine(deepspeed=str(path))


@pytest.mark.parametrize("bf16", [None, True])
def test_half_precision_of_the_launcher_is_refused(monkeypatch, bf16: bool | None):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="mixed_precision=fp16 of accelerate launch"):
        Engine(bf16=bf16)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    Engine()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="each would train alone"):
        Engine()
