"""Compute reference log-probabilities, values and reward scores of a rollout."""

from collections.abc import Sequence

from torch import nn

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompts import Prompt
from ppo_core.data.reward_columns import NO_COLUMNS, Columns
from ppo_core.data.types import Rollout, Scores
from ppo_core.distributed.engine import Engine
from ppo_core.ppo.logprobs_and_values import critic_values, exact_kl, response_logprobs
from ppo_core.ppo.model_bundle import ModelBundle, reward_holders


def score(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    models: ModelBundle,
    module: nn.Module,
    engine: Engine,
    config: PPOConfig,
    columns: Columns = NO_COLUMNS,
) -> Scores:
    """Return the outputs of rewards, reference and critic for a rollout.

    The scores are neither scaled nor clipped. `module` is the prepared module with policy and
    critic. `columns` are the columns of the prompts' rows. Sharded models are gathered only while
    they are used.
    """
    size, equal_passes = config.local_rollout_forward_batch_size, engine.requires_equal_passes()
    divergences = None
    with engine.autocast():
        with engine.all_gathered(reward_holders(models.rewards, module)):
            scores, parts = models.rewards(prompts, rollout, columns)
        # The reference of a policy with an adapter uses the policy's base model.
        with engine.gathered(module if models.shares_weights else models.reference):
            ref_logprobs = response_logprobs(
                models.reference, rollout, size, equal_passes=equal_passes
            )
        values = None
        if models.critic is not None:
            with engine.gathered(module):
                values = critic_values(models.critic, rollout, size, equal_passes=equal_passes)
        if config.kl_estimator == "full":
            with engine.all_gathered([module, models.reference]):
                divergences = exact_kl(
                    models.policy, models.reference, rollout, size, equal_passes=equal_passes
                )
    return Scores(
        scores=scores, parts=parts, ref_logprobs=ref_logprobs, values=values, full_kl=divergences
    )
