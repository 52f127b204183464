"""Settings of PPO, immutable and validated on construction."""

import re
from dataclasses import dataclass, fields
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import Field, HttpUrl, ValidationError

from ppo_core.config.field_checks import (
    changed,
    check_fields,
    check_key,
    require,
    require_kept_checkpoints,
)
from ppo_core.config.run_config import RunConfig
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package
from ppo_core.io.validation import (
    Count,
    Natural,
    NotNegative,
    Positive,
    Share,
    ShareAbove0,
    ShareBelow1,
)

_NOT_OF_THE_RESULT = re.compile(
    "output_dir|exp_name|run_name|report_to|disable_tqdm|dataset_num_proc|num_sample_generations|"
    "local_rollout_forward_batch_size|per_device_eval_batch_size|(logging|eval|save|hub|warn)_.*|"
    "push_to_hub|.*_model_path|max_skipped_steps|max_steps|async_save|vllm_(server|weights)_.*|"
    # `mini_batch_size` only determines `Schedule.steps_per_update`, which fingerprints contain.
    "mini_batch_size|"
    # The number of processes, the sharding and the microbatches change results by rounding only.
    # The batch size, which `per_device_train_batch_size` may set, is in `Schedule`.
    "gradient_accumulation_steps|sharding|offload|deepspeed|ds3_gather_for_generation|ddp_timeout|"
    "per_device_train_batch_size|max_tokens_per_microbatch|gradient_checkpointing"
)
"""Pattern of the settings that do not change the result of an update."""

_POLYNOMIAL_END = 1e-7
"""Last learning rate of transformers' schedule `polynomial`."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """All settings of PPO apart from the models and the prompts.

    Names follow TRL's PPO (1.12 and the classic trainer). Defaults follow "The N+ Implementation
    Details of RLHF with PPO" (arXiv:2403.17031). Features outside TRL and that paper are off by
    default.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    # --- Length of the run and sizes of batches ---

    total_episodes: Count | None = None
    """Responses sampled in the run, rounded up to a multiple of the batch size. If `max_steps` is
    also set, the smaller number of updates counts. None: the batch size times `max_steps` if
    `max_steps` is set, and otherwise `samples_per_prompt` responses to each prompt in each of
    `num_train_epochs` passes."""

    batch_size: Count | None = None
    """Responses sampled for one PPO update, over all processes; None:
    per_device_train_batch_size x gradient_accumulation_steps x processes. If
    gradient_accumulation_steps is above 1, `batch_size` must equal this product."""

    num_ppo_epochs: Count = 4
    """Optimization epochs over each batch of responses."""

    num_mini_batches: Count = 1
    """Minibatches per epoch, each one optimizer step; must divide the batch size."""

    mini_batch_size: Count | None = None
    """Responses of one optimizer step over all processes; replaces `num_mini_batches`, as in TRL
    0.12 to 0.16, and must divide the batch size."""

    max_tokens_per_microbatch: Count | None = None
    """Maximum tokens of prompts and responses, padding included, in one forward and backward pass
    of one process. Memory grows with this number. None: the tokens of
    `per_device_train_batch_size` sequences of the greatest length. The limit does not apply to
    pretraining texts."""

    local_rollout_forward_batch_size: Count = 64
    """Batch size per process for sampling and scoring. Memory grows with the batch size; results
    do not depend on it."""

    # --- Sampling ---

    response_length: Count = 53
    """Maximum tokens of a response, the stop token included."""

    temperature: Positive = 0.7
    """The policy is softmax(logits / temperature), both in sampling and in training."""

    top_k: Natural = 0
    """Sample only from the k likeliest tokens; 0 samples from all tokens. Importance weights in
    the loss correct for the truncation."""

    top_p: ShareAbove0 = 1.0
    """Sample only from the smallest set of likeliest tokens whose total probability reaches this
    value (arXiv:1904.09751); 1 samples from all tokens. The loss is corrected as for `top_k`."""

    stop_token: Literal["eos"] | None = "eos"
    """Token that ends a response: `eos` is the tokenizer's end-of-sequence token; with None,
    every response has the maximum length."""

    stop_token_id: int | None = None
    """Id of the token that ends a response; overrides `stop_token`."""

    use_vllm: bool = False
    """Sample the training responses on a vLLM server, which loads the policy's current weights
    before each rollout (docs/vllm.md). In the flow the server also samples the answers for the
    validation of the reward model and for the win rate."""

    vllm_importance_sampling_cap: Annotated[float, Field(ge=1)] = 2.0
    """Cap of a token's importance weight min(p_policy / p_server, cap). The weights correct the
    loss where server and policy give a token different probabilities."""

    # --- The reward of a response ---

    missing_eos_penalty: NotNegative | None = None
    """Penalty subtracted from the score of a response without a stop token; None: no penalty."""

    length_penalty: NotNegative = 0.0
    """Penalty per response token, subtracted from the score."""

    overlong_buffer: Natural = 0
    """Number of tokens before `response_length` over which a penalty grows linearly from 0 to
    `overlong_penalty` (arXiv:2503.14476, eq. 13); 0 disables the penalty."""

    overlong_penalty: NotNegative = 1.0
    """Penalty of a response of `response_length` tokens; used only if `overlong_buffer` > 0."""

    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""

    use_score_norm: bool = False
    """Subtract the running mean of the scores before scaling; requires use_score_scaling."""

    reward_weights: list[float] | None = None
    """Weights of the rewards, in the order of the rewards; None: all weights are 1. A reward with
    weight 0 is computed and logged, and adds nothing."""

    scale_each_reward: bool = False
    """Divide each reward by its own running standard deviation before weighting, so that rewards
    of different scales count alike."""

    score_clip: Positive | None = None
    """Clip scores to [-score_clip, score_clip] after scaling; None: no clipping."""

    # --- The divergence from the reference ---

    kl_coef: NotNegative = 0.05
    """Weight of the KL divergence from the reference at each token; with `kl_target`, the initial
    weight."""

    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """Estimator of the KL divergence at each token (http://joschu.net/blog/kl-approx.html);
    `full` computes the exact divergence over the vocabulary."""

    kl_in_loss: bool = False
    """Add the KL divergence to the loss instead of subtracting it from the reward. Use k2 or full:
    in the loss, k3 has the gradient of KL(reference || policy), and the expected gradient of k1 is
    0, so k1 is refused (`ppo_core.algorithm.kl`)."""

    kl_target: Positive | None = None
    """Adapt kl_coef so that the KL divergence reaches this target, in nats per response; None keeps
    kl_coef fixed."""

    kl_horizon: Count | None = None
    """With `kl_target`, episodes over which kl_coef changes by at most about 20% (arXiv:1909.08593,
    section 2.2). None: 1/24 of the run, at least one batch; kl_coef then follows the moving average
    and the trend of the divergence, not the last batch alone (`AdaptiveKL.landing`)."""

    reference_refresh_updates: Natural = 0
    """Number of updates after which the policy is copied into the reference; 0: never."""

    # --- Advantages ---

    advantage_estimator: Literal["gae", "reinforce", "rloo", "grpo"] = "gae"
    """`gae` compares the rewards with a critic's values (arXiv:1506.02438). The other estimators
    train no critic, which saves memory. `reinforce` sums the rewards from each token to the end
    (arXiv:2501.03262). `rloo` (arXiv:2402.14740) and `grpo` (arXiv:2402.03300) compare a response
    with the other responses to the same prompt."""

    samples_per_prompt: Count = 1
    """Responses to each prompt of a batch; must divide `batch_size`. rloo and grpo need at least
    2."""

    scale_by_group_std: bool = True
    """With grpo, divide advantages by the standard deviation of the rewards in each prompt's group.
    False, with loss_aggregation="fixed_length", is Dr. GRPO (arXiv:2503.20783)."""

    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the batch, without changing their mean."""

    whiten_advantages: bool | None = None
    """Standardize advantages over the batch to mean 0 and standard deviation 1. None: True with gae
    and reinforce, False with rloo and grpo, as in the papers."""

    gamma: Share = 1.0
    """Discount factor per token."""

    lam: Share = 0.95
    """Lambda of generalized advantage estimation (arXiv:1506.02438)."""

    lam_critic: Share | None = None
    """Lambda for the critic's targets (decoupled GAE, arXiv:2503.01491); None: `lam`."""

    # --- The losses ---

    cliprange: NotNegative = 0.2
    """Clip the probability ratio to [1 - cliprange, 1 + cliprange] (arXiv:1707.06347, eq. 7)."""

    cliprange_high: Positive | None = None
    """Clip the ratio from above at 1 + cliprange_high (clip-higher, arXiv:2503.14476); None:
    `cliprange`."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound the loss of a token with negative advantage by dual_clip x |advantage|
    (arXiv:1912.09729, eq. 5). Must be above 1; None: no bound."""

    loss_aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """Average of the token losses in an optimizer step: `token` is the mean over all tokens,
    `sequence` the mean of the responses' means, and `fixed_length` the sum divided by
    responses x response_length (arXiv:2503.20783)."""

    vf_coef: NotNegative = 0.1
    """Weight of the value loss, relative to the policy loss."""

    cliprange_value: NotNegative = 0.2
    """In the value loss, clip the critic's new values to at most this distance from its values at
    sampling time."""

    critic_learning_rate: Positive | None = None
    """Peak learning rate of the critic; None: `learning_rate`."""

    critic_warmup_updates: Natural = 0
    """Number of initial updates that train only the critic."""

    shared_critic: bool = False
    """Use a value head on the policy's backbone as the critic."""

    ptx_coef: NotNegative = 0.0
    """Weight of the language-modeling loss on pretraining texts (PPO-ptx, arXiv:2203.02155)."""

    ema_decay: ShareBelow1 | None = None
    """Decay per update of an exponential moving average of the policy's weights. The average is
    then evaluated and saved instead of the trained weights. None: no average."""

    # --- When to stop, and when to warn ---

    target_kl: Positive | None = None
    """End the update of a batch once the KL divergence from the policy at sampling time exceeds
    1.5 x this value, in nats per token over all processes; None: never."""

    ratio_threshold: Positive | None = None
    """Skip optimizer steps whose mean probability ratio exceeds this value; None: never. With
    num_mini_batches=1, the update of the batch then ends."""

    max_skipped_steps: Count = 3
    """Number of consecutive skipped optimizer steps after which the run fails. A step is skipped
    for a non-finite score, loss or gradient, or by `ratio_threshold`."""

    warn_kl: float = 50.0
    """Warn when the KL divergence from the reference exceeds this many nats per response."""

    warn_kl_note: str = ""
    """Text to append to the warning of `warn_kl`, for example the risks of a large divergence."""

    warn_ratio: Positive = 2.0
    """Warn when the mean probability ratio of an update exceeds warn_ratio, or is below
    1 / (5 x warn_ratio)."""

    warn_entropy: float = 0.05
    """Warn when the policy's mean entropy per token falls below this fraction of the entropy in
    the first update. The limit is relative because normal entropy depends on the task."""

    warn_explained_variance: float = -0.5
    """Warn when the critic's explained variance of the returns falls below this value."""

    warn_length_growth: Positive = 2.0
    """Warn when the mean response length exceeds this multiple of the mean in the first update."""

    warn_repetition: float = 0.5
    """Warn when more than this fraction of the 3-grams in responses are repetitions."""

    # --- Earlier policies, sample tables, and names of models and adapters ---

    save_policies: Natural = 0
    """Number of policies to save before the end of the run, at equal intervals and without
    optimizer state; each is in `output_dir/policies/<update>`. `save_total_limit` does not remove
    them."""

    num_sample_generations: Natural = 10
    """Maximum number of times that responses to the evaluation prompts are printed as a table,
    after equally spaced updates up to the last update. If this number is positive, a table is also
    printed before the first update."""

    sft_model_path: str | None = None
    """Folder or hub id of the initial policy; a hub id may name a revision, as in
    `org/name@revision`. Used by `python -m ppo_core` and scripts."""

    reward_model_path: str | None = None
    """Folder or hub id of the reward model, in the form of `sft_model_path`. Used by
    `python -m ppo_core` and scripts."""

    model_adapter_name: str | None = None
    """Name of the PEFT adapter to train; None: the active adapter."""

    ref_adapter_name: str | None = None
    """Name of the PEFT adapter that is the reference; None: the base model without adapters."""

    ds3_gather_for_generation: bool = True
    """Gather sharded weights (zero3, fsdp2) once per rollout, which makes sampling far faster.
    False gathers layer by layer in each forward pass, for policies too large for one process."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        _check_ranges(self)
        _check_schedule(self)
        _check_rewards(self)
        _check_sampling(self)
        _check_estimator(self)
        _check_vllm(self)

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage_estimator == "gae"

    @property
    def compares_samples(self) -> bool:
        """Whether the advantages compare a prompt's responses with each other."""
        return self.advantage_estimator in ("rloo", "grpo")

    @property
    def standardizes_advantages(self) -> bool:
        """Whether advantages are standardized over the batch."""
        if self.whiten_advantages is None:
            return not self.compares_samples
        return self.whiten_advantages

    def settings_of_result(self) -> dict[str, Any]:
        """Return the settings that change the result of an update by more than rounding.

        The batch size and the number of updates may also depend on the number of processes and of
        prompts, so fingerprints take both from the `Schedule`.
        """
        names = [field.name for field in fields(self)]
        return {
            name: getattr(self, name) for name in names if not _NOT_OF_THE_RESULT.fullmatch(name)
        } | {"whiten_advantages": self.standardizes_advantages}


def _check_ranges(config: PPOConfig) -> None:
    check_fields(config, PPOConfig)
    if config.max_steps != -1:
        require(config, "max_steps", config.max_steps >= 1, "a whole number, at least 1")
    require_kept_checkpoints(config)


def _check_schedule(config: PPOConfig) -> None:
    if config.eval_steps is not None and config.eval_strategy == "no":
        raise ConfigError(
            f"eval_steps={config.eval_steps:g} would be ignored, because eval_strategy='no' "
            "evaluates nothing. Remove eval_steps, or set eval_strategy='steps'."
        )
    if config.batch_size is not None and (left := config.batch_size % config.num_mini_batches):
        raise ConfigError(
            f"num_mini_batches={config.num_mini_batches} does not divide "
            f"batch_size={config.batch_size}, so {left} responses would be dropped in every epoch. "
            "Set batch_size to a multiple of num_mini_batches."
        )
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} both set "
            "the warm-up. Set only one of the settings."
        )
    if config.lr_scheduler_type == "constant" and (config.warmup_steps or config.warmup_ratio):
        raise ConfigError(
            "lr_scheduler_type='constant' has no warm-up, so warmup_steps and warmup_ratio would "
            "be ignored. Set lr_scheduler_type='constant_with_warmup'."
        )
    if config.lr_scheduler_type == "polynomial" and config.learning_rate <= _POLYNOMIAL_END:
        raise ConfigError(
            f"lr_scheduler_type='polynomial' ends at a learning rate of {_POLYNOMIAL_END:g}, so "
            f"learning_rate={config.learning_rate:g} must be larger. Raise it, or set "
            "lr_scheduler_type='linear'."
        )


def _check_rewards(config: PPOConfig) -> None:
    if config.missing_eos_penalty and config.stop_token is None and config.stop_token_id is None:
        raise ConfigError(
            f"missing_eos_penalty={config.missing_eos_penalty} would be subtracted from every "
            "score, because there is no stop token. Set stop_token='eos' or stop_token_id."
        )
    if config.kl_in_loss and config.kl_estimator == "k1":
        raise ConfigError(
            "kl_in_loss=True has no effect with kl_estimator='k1', because the expected gradient "
            "of k1 is 0: the policy would not be kept near the reference. Set kl_estimator='k2' or "
            "'full'."
        )
    if config.kl_target is not None and config.kl_coef == 0:
        raise ConfigError(
            f"kl_target={config.kl_target} adapts kl_coef by multiplication, so kl_coef=0 would "
            "stay 0. Set kl_coef above 0."
        )
    if config.kl_horizon is not None and config.kl_target is None:
        raise ConfigError(
            f"kl_horizon={config.kl_horizon} takes effect only with kl_target. Set kl_target, or "
            "remove kl_horizon."
        )
    if config.use_score_norm and not config.use_score_scaling:
        raise ConfigError(
            "use_score_norm=True takes effect only with use_score_scaling=True. Set both to True."
        )
    if (weights := config.reward_weights) is not None:
        are_numbers = isinstance(weights, list | tuple) and all(map(_is_finite, weights))
        require(config, "reward_weights", are_numbers, "a list of finite numbers")
    if weights is not None and not any(weights):
        raise ConfigError(
            f"reward_weights={config.reward_weights} is empty or all 0, so nothing would be "
            "learned. Set a weight other than 0."
        )
    if config.scale_each_reward and config.use_score_scaling:
        raise ConfigError(
            "scale_each_reward=True already divides each reward by its standard deviation, and "
            "use_score_scaling=True would divide their sum once more, so only the ratio of "
            "reward_weights would count. Set one of them to False."
        )
    if config.overlong_buffer > config.response_length:
        raise ConfigError(
            f"overlong_buffer={config.overlong_buffer} is longer than "
            f"response_length={config.response_length}, so every response would be penalized. "
            "Set overlong_buffer to at most response_length."
        )


def _check_sampling(config: PPOConfig) -> None:
    if (config.top_k or config.top_p < 1) and config.kl_estimator == "k1":
        raise ConfigError(
            f"top_k={config.top_k} and top_p={config.top_p} truncate sampling, which makes the k1 "
            "estimate of the KL divergence biased and possibly negative. Set kl_estimator to full "
            "or k3."
        )
    if config.ref_adapter_name and config.ref_adapter_name == config.model_adapter_name:
        raise ConfigError(
            f"model_adapter_name and ref_adapter_name are both {config.ref_adapter_name!r}: the "
            "reference would change with the policy. Name two different adapters."
        )


_OF_CRITIC = (
    "lam",
    "lam_critic",
    "vf_coef",
    "cliprange_value",
    "critic_learning_rate",
    "critic_warmup_updates",
    "shared_critic",
    "warn_explained_variance",
)
"""Settings that have an effect only in a run with a critic."""


def _check_estimator(config: PPOConfig) -> None:
    name = config.advantage_estimator
    if config.compares_samples and config.samples_per_prompt < 2:
        raise ConfigError(
            f"advantage_estimator={name!r} compares several responses to a prompt, and "
            f"samples_per_prompt={config.samples_per_prompt} gives each prompt only one. Set "
            "samples_per_prompt=4, for example."
        )
    ignored = [] if config.has_critic else [*_OF_CRITIC]
    if config.compares_samples:
        # These estimators use only the sum of a response's rewards.
        ignored += ["gamma", "whiten_rewards"]
    if name != "grpo":
        ignored += ["scale_by_group_std"]
    for setting in changed(config):
        if setting in ignored:
            raise ConfigError(
                f"{setting}={getattr(config, setting)!r} has no effect with "
                f"advantage_estimator={name!r}. Remove it, or choose another estimator."
            )


def _is_address(url: str) -> bool:
    try:
        HttpUrl(url)
    except ValidationError:
        return False
    return True


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _check_vllm(config: PPOConfig) -> None:
    url = config.vllm_server_base_url
    is_valid = (
        isinstance(url, str)
        and url.startswith(("http://", "https://"))
        and not url.rstrip("/").endswith("/v1")
        and url.isprintable()
        and _is_address(url)
    )
    require(config, "vllm_server_base_url", is_valid, "http://HOST:PORT, without /v1")
    if config.use_vllm and config.vllm_weights_dir is None:
        raise ConfigError(
            "use_vllm=True needs vllm_weights_dir, the folder from which the server reads the "
            "policy's weights. Without the folder, the server would sample from its initial "
            "weights. On a single machine, set vllm_weights_dir=/dev/shm/weights, for example."
        )
    if config.use_vllm:
        require_package("openai", extra="vllm", needed_by="use_vllm=True")
        check_key("VLLM_API_KEY")
    given = [name for name in changed(config) if name.startswith("vllm_")]
    if given and not config.use_vllm:
        raise ConfigError(
            f"{given[0]} takes effect only with use_vllm=True. Set use_vllm=True, or remove "
            f"{given[0]}."
        )
