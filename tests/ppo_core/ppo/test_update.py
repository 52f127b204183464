"""The update: one optimizer step against autograd on the whole batch, and what must not matter."""

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience
from ppo_core.distributed.engine import Engine
from ppo_core.errors import RunInterruptedError
from ppo_core.models import lm_head
from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.kernels import matmul_backend
from ppo_core.models.kernels.matmul_backend import uses_onednn
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo import passes
from ppo_core.ppo.objective import SUMS
from ppo_core.ppo.optimizer import parameter_groups
from ppo_core.ppo.ptx import PretrainingTexts, joined_texts
from ppo_core.ppo.schedule import make_schedule, make_scheduler
from ppo_core.ppo.update import TrainState, UpdateProgress, _own_microbatches, update_policy
from tests.helpers.models.rollouts import make_rollout, row_of
from tests.helpers.models.tiny import VOCABULARY, make_policy, make_prompts

LENGTHS = (5, 1, 3, 5, 2, 4, 1, 1)


def make_config(**changes) -> PPOConfig:
    settings = {
        "batch_size": 8,
        "total_episodes": 8,
        "num_ppo_epochs": 1,
        "per_device_train_batch_size": 8,
    }
    return PPOConfig(**{**settings, "max_grad_norm": 1e9, **changes})


def make_experience(*, seed=0) -> Experience:
    """Old log-probabilities near the policy's own, so that some tokens are clipped."""
    rollout = make_rollout((3, 7, 1, 2, 6, 4, 5, 2), LENGTHS, seed=seed)
    policy = LanguageModel(make_policy())
    mask = rollout.response_mask
    with torch.no_grad():
        logprobs, _ = policy(rollout.token_rows(torch.arange(8)), rollout.temperature)
    noise = 0.3 * torch.randn(len(logprobs))
    old = torch.zeros(mask.shape).masked_scatter(mask, logprobs + noise)
    rollout = dataclasses.replace(rollout, logprobs=old)
    draw = [torch.where(mask, torch.randn(mask.shape), 0) for _ in range(3)]
    return Experience(
        rollout=rollout,
        values=draw[0],
        ref_logprobs=torch.where(mask, old + 0.1 * torch.randn(mask.shape), 0),
        advantages=draw[1],
        returns=draw[2],
    )


def make_train_state(learning_rate=0.1) -> TrainState:
    critic = Critic.from_policy(make_policy(seed=5))
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    module = ActorCritic(LanguageModel(make_policy()), critic)
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return TrainState(module=module, optimizer=optimizer, scheduler=scheduler, engine=Engine())


def weights_after(config: PPOConfig, experience: Experience, train_state: TrainState | None = None):
    train_state = train_state or make_train_state()
    progress = make_progress(config, experience)
    update_policy(train_state, experience, config, progress)
    return {name: p.detach() for name, p in train_state.module.named_parameters()}, progress.sums


def make_progress(config: PPOConfig, experience: Experience) -> UpdateProgress:
    generator = torch.Generator().manual_seed(config.seed)
    return UpdateProgress.at_start(config, len(experience.rollout), generator)


# --- One optimizer step, read independently ---


def plain_rows(module: ActorCritic, experience: Experience) -> list[SimpleNamespace]:
    """Each response by itself, by transformers' own forward pass: what its loss is made of."""
    rollout, rows = experience.rollout, []
    for b in range(8):
        ids, start = torch.tensor(row_of(rollout, b)), int(rollout.prompt_lengths[b])
        logits = module.policy.model(ids[None]).logits[0, start - 1 : -1] / rollout.temperature
        hidden = module.critic.model(ids[None]).last_hidden_state[0, start - 1 : -1]
        own = slice(0, int(rollout.response_lengths[b]))
        behavior = rollout.behavior_logprobs
        rows.append(
            SimpleNamespace(
                ids=ids,
                start=start,
                logits=logits.log_softmax(-1),
                logprobs=logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0],
                values=module.critic.head(hidden)[:, 0],
                old=rollout.logprobs[b, own],
                behavior=None if behavior is None else behavior[b, own],
                ref=experience.ref_logprobs[b, own],
                advantages=experience.advantages[b, own],
                old_values=experience.values[b, own],
                returns=experience.returns[b, own],
            )
        )
    return rows


def surrogate(row, *, low=0.2, high=0.2, dual=None) -> Tensor:
    """The clipped objective, negated: arXiv:1707.06347, eq. 7; arXiv:1912.09729, eq. 5."""
    ratio = (row.logprobs - row.old).exp()
    objective = torch.minimum(
        ratio * row.advantages, ratio.clamp(1 - low, 1 + high) * row.advantages
    )
    if dual is not None:
        bound = torch.maximum(objective, dual * row.advantages)
        objective = torch.where(row.advantages < 0, bound, objective)
    return -objective


def value_error(row) -> Tensor:
    near = row.old_values + (row.values - row.old_values).clamp(-0.2, 0.2)
    return 0.5 * torch.maximum((row.values - row.returns) ** 2, (near - row.returns) ** 2)


def plain_loss(rows, **clips) -> Tensor:
    """The mean over all counted tokens, the critic's with its default weight."""
    of_policy = torch.cat([surrogate(row, **clips) for row in rows]).mean()
    return of_policy + 0.1 * torch.cat([value_error(row) for row in rows]).mean()


def assert_one_step_is(
    plain: Callable[[ActorCritic, list[SimpleNamespace]], Tensor],
    config: PPOConfig,
    experience: Experience,
    make: Callable[[], TrainState] | None = None,
) -> None:
    """A step of the update, in microbatches, has the gradient of the plain loss."""
    make = make or make_train_state
    config = dataclasses.replace(config, per_device_train_batch_size=3)
    actual, _ = weights_after(config, experience, make())
    module = (train_state := make()).module
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    plain(module, plain_rows(module, experience)).backward()
    train_state.optimizer.step()
    assert any((actual[name] - weight).abs().max() > 1e-3 for name, weight in before.items())
    for name, parameter in module.named_parameters():
        assert_close(actual[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)


def test_one_step_is_plain_autograd_on_the_mean_over_all_counted_tokens():
    config, experience = make_config(per_device_train_batch_size=3), make_experience()
    assert_one_step_is(lambda _, rows: plain_loss(rows), config, experience)

    _, sums = weights_after(config, experience)
    rows = plain_rows(make_train_state().module, experience)
    assert sums.tokens == sum(LENGTHS)
    of_policy = torch.cat([surrogate(row) for row in rows]).mean().item()
    of_critic = torch.cat([value_error(row) for row in rows]).mean().item()
    assert sums.policy_loss / sums.tokens == pytest.approx(of_policy, abs=1e-6)
    assert sums.value_loss / sums.tokens == pytest.approx(of_critic, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "clips"),
    [
        ({"cliprange": 0.1, "cliprange_high": 0.35}, {"low": 0.1, "high": 0.35}),
        ({"dual_clip": 1.1}, {"dual": 1.1}),
    ],
    ids=["clip-higher", "dual clip"],
)
def test_one_step_with_another_clip_is_plain_autograd(changes, clips):
    assert_one_step_is(
        lambda _, rows: plain_loss(rows, **clips), make_config(**changes), make_experience()
    )


@pytest.mark.parametrize("how", ["sequence", "fixed_length"])
def test_one_step_with_another_mean_is_plain_autograd(how):
    def plain(_, rows):
        losses = [surrogate(row) + 0.1 * value_error(row) for row in rows]
        if how == "sequence":
            return torch.stack([loss.mean() for loss in losses]).mean()
        return torch.stack([loss.sum() for loss in losses]).sum() / (8 * 6)

    config = make_config(loss_aggregation=how, response_length=6)
    assert_one_step_is(plain, config, make_experience())


def test_one_step_with_the_k2_divergence_in_the_loss_is_plain_autograd():
    def plain(_, rows):
        divergence = torch.cat([0.5 * (row.logprobs - row.ref) ** 2 for row in rows]).mean()
        return plain_loss(rows) + 0.3 * divergence

    experience = dataclasses.replace(make_experience(), kl_loss_coef=0.3)
    assert_one_step_is(plain, make_config(kl_in_loss=True, kl_estimator="k2"), experience)


def test_one_step_with_the_exact_divergence_in_the_loss_is_plain_autograd():
    reference = make_policy(seed=7)

    def plain(_, rows):
        divergences = []
        for row in rows:
            with torch.no_grad():
                logits = reference(row.ids[None]).logits[0, row.start - 1 : -1] / 0.7
            differences = row.logits - logits.log_softmax(-1)
            divergences.append((row.logits.exp() * differences).sum(-1))
        return plain_loss(rows) + 0.3 * torch.cat(divergences).mean()

    def make():
        return dataclasses.replace(make_train_state(), reference=LanguageModel(reference))

    experience = dataclasses.replace(make_experience(), kl_loss_coef=0.3)
    config = make_config(kl_in_loss=True, kl_estimator="full")
    assert_one_step_is(plain, config, experience, make)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_one_step_with_pretraining_texts_is_plain_autograd():
    texts = make_prompts([4, 2, 6, 3, 5, 7, 2, 4, 3])

    def plain(module, rows):
        seen = joined_texts(PretrainingTexts(texts, seed=3).next_texts(8))
        likelihoods = [
            module.policy.model(ids[None, :length])
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, ids[1:length, None])
            for ids, length in zip(seen.ids, seen.lengths, strict=True)
        ]
        return plain_loss(rows) - 0.6 * torch.cat(likelihoods).mean()

    def make():
        return dataclasses.replace(make_train_state(), pretraining=PretrainingTexts(texts, seed=3))

    assert_one_step_is(plain, make_config(ptx_coef=0.6), make_experience(), make)


def test_pretraining_texts_are_learned_no_more_at_a_time_than_responses():
    train_state = make_train_state()
    train_state.pretraining = PretrainingTexts(make_prompts([4, 2, 6, 3, 5, 7, 2, 4]), seed=3)
    widths = []
    train_state.module.policy.model.model.layers[0].register_forward_pre_hook(
        lambda _, inputs: widths.append(len(inputs[0]))
    )
    weights_after(
        make_config(per_device_train_batch_size=3, ptx_coef=0.6), make_experience(), train_state
    )
    assert widths == [3, 3, 2, 3, 3, 2]


def test_tokens_from_a_part_of_the_policy_weigh_by_its_share():
    experience = make_experience()
    rollout, mask = experience.rollout, experience.rollout.response_mask
    # Drawn from a part that holds from 50 to 100 % of the policy's probability.
    behavior = torch.where(
        mask, rollout.logprobs - torch.empty(mask.shape).uniform_(0.5, 1).log(), 0
    )
    rollout = dataclasses.replace(rollout, behavior_logprobs=behavior)

    def plain(_, rows):
        losses = [surrogate(row) * (row.old - row.behavior).exp() for row in rows]
        values = torch.cat([value_error(row) for row in rows])
        return torch.cat(losses).mean() + 0.1 * values.mean()

    restricted = dataclasses.replace(experience, rollout=rollout)
    assert_one_step_is(plain, make_config(), restricted)


def make_shared_train_state() -> TrainState:
    policy = LanguageModel(make_policy())
    torch.manual_seed(1)
    module = ActorCritic(policy, Critic.on_policy(policy))
    torch.nn.init.normal_(module.critic.head.weight, std=0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return TrainState(module=module, optimizer=optimizer, scheduler=scheduler, engine=Engine())


def test_one_step_of_a_critic_on_the_policys_backbone_is_plain_autograd():
    assert_one_step_is(
        lambda _, rows: plain_loss(rows), make_config(), make_experience(), make_shared_train_state
    )


def test_a_shared_backbone_is_computed_once_a_microbatch():
    calls = []
    for train_state in (make_shared_train_state(), make_train_state()):
        layer = train_state.module.policy.model.model.layers[0]
        others = train_state.module.critic.model.layers[0]
        count = []
        handles = [
            each.register_forward_hook(lambda *_, n=count: n.append(1)) for each in {layer, others}
        ]
        weights_after(make_config(per_device_train_batch_size=4), make_experience(), train_state)
        assert handles
        calls.append(len(count))
    assert calls == [2, 4]


# --- What must not matter, and what ends or skips steps ---


class WatchedEngine(Engine):
    """Notes which library multiplies on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.by_onednn: list[bool] = []

    def backward(self, loss: Tensor) -> None:
        self.by_onednn.append(uses_onednn())
        super().backward(loss)


@pytest.mark.parametrize(
    ("make", "ways_back"),
    [(make_train_state, 2), (make_shared_train_state, 1)],
    ids=["two", "shared"],
)
@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.usefixtures("onednn_tried_anew")
def test_large_layers_are_multiplied_by_onednn_on_the_way_back(
    make, ways_back, is_large, monkeypatch
):
    largest_of_a_layer = 32 * 64
    least = largest_of_a_layer if is_large else largest_of_a_layer + 1
    monkeypatch.setattr(matmul_backend, "MAX_ERROR", 1.0)  # also on a processor that rounds
    for module in (matmul_backend, passes):
        monkeypatch.setattr(module, "MIN_NUMEL", least)
    config, experience, engine = make_config(), make_experience(), WatchedEngine()
    train_state = dataclasses.replace(make(), engine=engine)
    update_policy(train_state, experience, config, make_progress(config, experience))
    assert engine.by_onednn == [is_large] * ways_back


class ProcessOf(Engine):
    """An engine that shares batches as one of several processes."""

    rank, num_processes = 0, 1

    def __init__(self, rank: int, num_processes: int) -> None:
        super().__init__()
        self.rank, self.num_processes = rank, num_processes


def test_no_process_has_more_tokens_in_a_pass_than_the_limit():
    rollout = make_experience().rollout
    config = make_config(max_tokens_per_microbatch=20)
    engines = [ProcessOf(rank, 2) for rank in (0, 1)]
    shares = [_own_microbatches(rollout, torch.arange(8), config, engine) for engine in engines]
    assert len(shares[0]) == len(shares[1])
    passes = [part.sequences for share in shares for part in share]
    assert sorted(torch.cat(passes).tolist()) == list(range(8))
    assert all(len(part) * int(rollout.row_lengths[part].max()) <= 20 for part in passes)


def test_a_process_without_a_row_passes_the_shortest_one_and_changes_nothing():
    train_state, widths = make_train_state(), []
    embedding = train_state.actor_critic.policy.model.model.embed_tokens
    embedding.register_forward_hook(lambda _, inputs, out: widths.append(inputs[0].shape[1]))
    config, experience = make_config(batch_size=9, total_episodes=9), make_experience()
    train_state.engine = ProcessOf(rank=8, num_processes=9)
    before = [p.detach().clone() for p in train_state.module.parameters()]
    update_policy(train_state, experience, config, make_progress(config, experience))
    # Of the 8 rows, the first has 8 tokens, and the last has 3.
    assert widths and {*widths} == {3}
    for weight, parameter in zip(before, train_state.module.parameters(), strict=True):
        assert_close(parameter.detach(), weight, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["token", "sequence", "fixed_length"])
@pytest.mark.parametrize("per_device_train_batch_size", [1, 3])
def test_the_microbatch_size_changes_nothing(per_device_train_batch_size, how):
    experience = make_experience()
    config = make_config(num_ppo_epochs=2, num_mini_batches=2, loss_aggregation=how)
    whole, _ = weights_after(config, experience)
    split, _ = weights_after(
        dataclasses.replace(config, per_device_train_batch_size=per_device_train_batch_size),
        experience,
    )
    for name, weight in whole.items():
        assert_close(split[name], weight, rtol=0, atol=1e-6, msg=name)


def test_every_pass_steps_once_a_minibatch_and_sees_every_response_once(monkeypatch):
    train_state, steps = make_train_state(), []
    plain = train_state.optimizer.step
    monkeypatch.setattr(train_state.optimizer, "step", lambda: steps.append(1) or plain())
    _, sums = weights_after(
        make_config(num_ppo_epochs=3, num_mini_batches=4, per_device_train_batch_size=1),
        make_experience(),
        train_state,
    )
    assert len(steps) == 12
    assert sums.tokens == 3 * sum(LENGTHS)
    assert train_state.scheduler.last_epoch == 12


def test_the_order_is_new_in_every_pass(monkeypatch):
    orders = []
    plain = torch.randperm

    def randperm(*args, **settings):
        orders.append(plain(*args, **settings))
        return orders[-1]

    monkeypatch.setattr(torch, "randperm", randperm)
    weights_after(make_config(num_ppo_epochs=2), make_experience())
    assert len(orders) == 2
    assert orders[0].tolist() != orders[1].tolist()


def test_the_critic_learns_and_so_does_the_policy():
    before = {name: p.detach().clone() for name, p in make_train_state().module.named_parameters()}
    after, _ = weights_after(make_config(), make_experience())
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"policy", "critic"}


def test_gradients_are_scaled_down_to_the_norm_that_is_set():
    before = {
        name: p.detach().clone() for name, p in make_train_state(1.0).module.named_parameters()
    }
    after, _ = weights_after(
        make_config(max_grad_norm=0.01), make_experience(), make_train_state(1.0)
    )
    squares = sum(((after[name] - before[name]) ** 2).sum() for name in before)
    # At a learning rate of 1, SGD moves by exactly the gradient.
    assert squares.sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_the_ratio_is_one_before_the_policy_moves():
    experience = make_experience()
    train_state = make_train_state()
    rollout = experience.rollout
    with torch.no_grad():
        logprobs, _ = train_state.module.policy(rollout.token_rows(torch.arange(8)), 0.7)
    old = torch.zeros(rollout.logprobs.shape).masked_scatter(rollout.response_mask, logprobs)
    fresh = dataclasses.replace(experience, rollout=dataclasses.replace(rollout, logprobs=old))
    _, sums = weights_after(make_config(num_ppo_epochs=3), fresh, train_state)
    assert sums.first_tokens == sum(LENGTHS)
    assert sums.first_ratio_error / sums.first_tokens < 1e-5
    assert abs(sums.ratio_error) > 1e-3


def test_a_gradient_that_is_not_finite_moves_nothing():
    experience = make_experience()
    experience.advantages[0, 0] = torch.inf
    train_state = make_train_state()
    before = {name: p.detach().clone() for name, p in train_state.module.named_parameters()}
    weights_after(make_config(), experience, train_state)
    assert (train_state.skipped_steps, train_state.skipped_in_a_row) == (1, 1)
    for name, parameter in train_state.module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_nothing_behind_the_end_of_a_response_is_learned_from():
    experience = make_experience()
    spoilt = dataclasses.replace(
        experience,
        **{
            name: torch.where(
                experience.rollout.response_mask, getattr(experience, name), torch.nan
            )
            for name in ("values", "advantages", "returns")
        },
    )
    clean, _ = weights_after(make_config(), experience)
    dirty, _ = weights_after(make_config(), spoilt)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_a_critic_that_warms_up_leaves_the_policy_as_it_is_to_the_bit():
    # AdamW's weight decay would move it with no gradient at all, so its learning rate is 0.
    config = make_config(
        num_ppo_epochs=2,
        critic_warmup_updates=1,
        weight_decay=0.1,
        learning_rate=1e-2,
        total_episodes=16,
    )
    module = make_train_state().module
    optimizer = torch.optim.AdamW(parameter_groups(module.policy, module.critic, config))
    schedule = make_schedule(config, num_prompts=8, num_processes=1)
    train_state = TrainState(
        module=module,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, config, schedule),
        engine=Engine(),
    )
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    computed = set()
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda _, name=name: computed.add(name))
    experience = make_experience()
    progress = make_progress(config, experience)
    update_policy(train_state, experience, config, progress, critic_only=True)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.startswith("critic.")}
    assert computed == moved
    # Otherwise the first steps of the policy would be larger than those of a new optimizer.
    counted = {name for name, p in module.named_parameters() if p in optimizer.state}
    assert counted == moved


def divergence_and_ratio() -> tuple[float, float]:
    """Of the policy from the one that sampled: the mean k3 estimate, and the mean ratio."""
    rows = plain_rows(make_train_state().module, make_experience())
    moved = torch.cat([row.logprobs - row.old for row in rows])
    return (moved.exp() - 1 - moved).mean().item(), moved.exp().mean().item()


@pytest.mark.parametrize(("share", "steps"), [(0.999, 1), (1.001, 5)])
def test_passes_end_where_the_policy_has_moved_too_far(share, steps):
    target = share * divergence_and_ratio()[0] / 1.5
    train_state = make_train_state(learning_rate=0.0)
    config = make_config(num_ppo_epochs=5, target_kl=target)
    _, sums = weights_after(config, make_experience(), train_state)
    assert sums.tokens == steps * sum(LENGTHS)
    # Steps that are left out count for the schedule, which ends with the run.
    assert train_state.scheduler.last_epoch == 5


@pytest.mark.parametrize(("share", "skipped"), [(0.999, 1), (1.001, 0)])
def test_a_step_of_too_large_a_ratio_is_skipped_and_counted(share, skipped):
    train_state = make_train_state()
    before = {name: p.detach().clone() for name, p in train_state.module.named_parameters()}
    config = make_config(ratio_threshold=share * divergence_and_ratio()[1])
    after, _ = weights_after(config, make_experience(), train_state)
    assert train_state.skipped_steps == skipped
    assert train_state.skipped_in_a_row == skipped
    assert all(torch.equal(before[name], after[name]) for name in before) == bool(skipped)
    assert all(parameter.grad is None for parameter in train_state.module.parameters())


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_update_there():
    experience = make_experience()
    experience.advantages[0, 0] = torch.inf
    train_state = make_train_state()
    weights_after(make_config(num_ppo_epochs=5, max_skipped_steps=3), experience, train_state)
    assert (train_state.skipped_steps, train_state.skipped_in_a_row) == (3, 3)


@pytest.mark.parametrize(("mini_batches", "skipped"), [(1, 1), (2, 3)])
def test_steps_of_too_large_a_ratio_end_the_update_and_one_batch_counts_once(
    mini_batches: int, skipped: int
):
    # With one step per epoch, the steps of the next epochs would be skipped for the same reason.
    train_state = make_train_state()
    config = make_config(
        num_ppo_epochs=5, num_mini_batches=mini_batches, max_skipped_steps=3, ratio_threshold=1e-3
    )
    weights_after(config, make_experience(), train_state)
    assert (train_state.skipped_steps, train_state.skipped_in_a_row) == (skipped, skipped)
    assert train_state.scheduler.last_epoch == 5 * mini_batches


class CountingEngine(Engine):
    """Notes how often processes would meet to sum, and how many numbers they would."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: list[int] = []

    def sum(self, tensor: Tensor) -> Tensor:
        self.summed.append(tensor.numel())
        return super().sum(tensor)


@pytest.mark.parametrize("microbatch_size", [8, 1])
def test_sums_reach_the_host_and_other_processes_once_an_optimizer_step(
    microbatch_size, monkeypatch
):
    reads: list[str] = []
    for name in ("__float__", "item", "tolist"):
        plain = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda *args, n=name, call=plain: reads.append(n) or call(*args)
        )
    engine = CountingEngine()
    config = make_config(
        num_ppo_epochs=2, num_mini_batches=2, per_device_train_batch_size=microbatch_size
    )
    experience = make_experience()
    progress = make_progress(config, experience)
    train_state = dataclasses.replace(make_train_state(), engine=engine)
    reads.clear()
    update_policy(train_state, experience, config, progress)
    assert engine.summed == [len(SUMS)] * 4
    assert reads == ["tolist"] * 4


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_update_that_was_stopped_after_a_step_continues_to_the_same_weights(steps):
    def stop() -> None:
        if progress.steps_done == steps:
            raise RunInterruptedError

    texts = make_prompts([4, 2, 6, 3, 5])
    config = make_config(num_ppo_epochs=2, num_mini_batches=2, ptx_coef=0.1)
    runs = []
    for before_step in (lambda: None, stop):
        train_state = dataclasses.replace(
            make_train_state(), pretraining=PretrainingTexts(texts, seed=3)
        )
        experience = make_experience()
        progress = make_progress(config, experience)
        with contextlib.suppress(RunInterruptedError):
            update_policy(train_state, experience, config, progress, before_step=before_step)
        assert progress.steps_done == (steps if before_step is stop else 4)
        assert all(parameter.grad is None for parameter in train_state.module.parameters())
        sums = update_policy(train_state, experience, config, progress)
        runs.append((train_state.module.state_dict(), sums))
    (whole, sums), (continued, continued_sums) = runs
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert sums == continued_sums


def test_a_good_step_ends_the_row_of_bad_ones():
    train_state, broken = make_train_state(), make_experience()
    broken.advantages[0, 0] = torch.nan
    weights_after(make_config(num_ppo_epochs=2), broken, train_state)
    assert (train_state.skipped_steps, train_state.skipped_in_a_row) == (2, 2)
    weights_after(make_config(), make_experience(), train_state)
    assert (train_state.skipped_steps, train_state.skipped_in_a_row) == (2, 0)


# --- Half precision ---


def half_precision_gradients(monkeypatch, of_ours: bool, **head) -> dict[str, Tensor]:
    """Gradients of the summed log-probabilities, by our head or by the plain logits."""
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 5 * VOCABULARY)  # several chunks
    policy, reference = LanguageModel(make_policy()), LanguageModel(make_policy(seed=7))
    rows = make_experience().rollout.token_rows(torch.arange(8))
    with torch.autocast("cpu", torch.bfloat16):
        states = policy.backbone.states(rows)
        if of_ours:
            of_logprobs = policy.predict(states, rows, 0.7, lambda logprobs, _: logprobs).loss
            divergence = policy.full_kl(states, reference, rows, 0.7)
        else:
            plain = (policy.logits(states).float() / 0.7).log_softmax(-1)
            of_logprobs = plain.gather(1, rows.targets[:, None]).sum()
            with torch.no_grad():
                theirs = reference.logits(reference.backbone.states(rows)).float() / 0.7
            divergence = (plain.exp() * (plain - theirs.log_softmax(-1))).sum(-1)
    loss = head["of_logprobs"] * of_logprobs + head["of_divergence"] * divergence.sum()
    loss.backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize(
    "head", [{"of_logprobs": 1.0, "of_divergence": 0.0}, {"of_logprobs": 0.0, "of_divergence": 1.0}]
)
def test_gradients_in_half_precision_are_those_of_the_plain_forward_pass(head, monkeypatch):
    # bfloat16 keeps 8 bits, so gradients agree to about a hundredth of the largest.
    actual = half_precision_gradients(monkeypatch, True, **head)
    expected = half_precision_gradients(monkeypatch, False, **head)
    for name, gradient in expected.items():
        assert_close(
            actual[name] / gradient.abs().max(), gradient / gradient.abs().max(), rtol=0, atol=1e-2
        )
