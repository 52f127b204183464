"""Settings of PPO: frozen, and validated on construction."""

from dataclasses import dataclass, fields
from math import isfinite
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

from ppo_core.config.checks import require, require_count
from ppo_core.config.run_config import RunConfig
from ppo_core.config.unsupported_settings import refusing_unsupported
from ppo_core.errors import ConfigError


@refusing_unsupported
@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """All settings of PPO apart from the models and the prompts.

    Names are those of TRL's PPO (1.12 and the classic trainer); defaults are those of "The N+
    Implementation Details of RLHF with PPO" (arXiv:2403.17031). Options found in neither are off.

    Raises:
        ConfigError: a value is out of range, two values contradict each other, or a setting of
            `transformers.TrainingArguments` or TRL is given that is not supported here.
    """

    # --- Length of the run and sizes of batches ---

    total_episodes: int | None = None
    """Responses sampled in the full run, rounded up to full updates; None: `num_train_epochs`
    passes over the prompts."""

    batch_size: int | None = None
    """Responses sampled for one PPO update, over all processes; None:
    per_device_train_batch_size x gradient_accumulation_steps x processes."""

    num_ppo_epochs: int = 4
    """Optimization epochs over each batch of responses."""

    num_mini_batches: int = 1
    """Minibatches, and so optimizer steps, in one epoch; must divide the batch size."""

    max_tokens_per_microbatch: int | None = None
    """Maximum tokens of prompts and responses in one forward and backward pass of one process,
    padding included. Memory grows with it. None: the tokens of the `per_device_train_batch_size`
    longest sequences. Pretraining texts are always batched by their number."""

    local_rollout_forward_batch_size: int = 64
    """Prompts answered, or responses scored, in one batch per process. Memory grows with it;
    results do not depend on it."""

    # --- Sampling ---

    response_length: int = 53
    """Maximum tokens of a response, the stop token included."""

    temperature: float = 0.7
    """The policy is softmax(logits / temperature), both in sampling and in training."""

    top_k: int = 0
    """Sample only from the k likeliest tokens; 0 samples from all. Importance weights in the
    loss correct for the truncation."""

    top_p: float = 1.0
    """Sample only from the smallest set of likeliest tokens with this total probability
    (arXiv:1904.09751); 1 samples from all. Corrected in the loss like `top_k`."""

    stop_token: Literal["eos"] | None = "eos"
    """Token that ends a response: `eos`, the tokenizer's end-of-sequence token, or None for no
    token."""

    stop_token_id: int | None = None
    """Id of the token that ends a response; overrides `stop_token`."""

    use_vllm: bool = False
    """Sample the training responses on a vLLM server, which receives the current weights of the
    policy before each rollout (docs/vllm.md). Evaluation is sampled without the server."""

    vllm_importance_sampling_cap: float = 2.0
    """Upper bound of a token's importance weight min(p_policy / p_server, cap), which corrects
    the loss where the server's probability of a token differs from the policy's."""

    # --- The reward of a response ---

    missing_eos_penalty: float | None = None
    """Subtracted from the score of a response without a stop token; None subtracts nothing."""

    length_penalty: float = 0.0
    """Subtracted from the score for each token of a response."""

    overlong_buffer: int = 0
    """Number of final tokens of `response_length` over which a penalty grows linearly from 0 to
    `overlong_penalty` (arXiv:2503.14476, eq. 13); 0 disables the penalty."""

    overlong_penalty: float = 1.0
    """Penalty of a response of `response_length` tokens; used only if `overlong_buffer` > 0."""

    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""

    use_score_norm: bool = False
    """Subtract the running mean of the scores before scaling; requires use_score_scaling."""

    reward_weights: list[float] | None = None
    """Weights of the reward functions, in their order; None gives each weight 1."""

    score_clip: float | None = None
    """Clip scores to [-score_clip, score_clip] after scaling; None clips nothing."""

    # --- The divergence from the reference ---

    kl_coef: float = 0.05
    """Weight of the KL divergence from the reference, per token; the initial weight if
    `kl_target` is set."""

    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """Estimator of that divergence at each token (http://joschu.net/blog/kl-approx.html); `full`
    computes it exactly over the vocabulary."""

    kl_in_loss: bool = False
    """Add the divergence to the loss instead of subtracting it from the reward. Use k2 or full:
    in the loss, the expected gradient of k1 is 0, and that of k3 is the gradient of
    KL(reference || policy) (`ppo_core.algorithm.kl`)."""

    kl_target: float | None = None
    """Target of the divergence, in nats per response, to which kl_coef adapts (arXiv:1909.08593,
    section 2.2); None keeps kl_coef fixed."""

    kl_horizon: int = 10_000
    """Episodes over which an adaptive kl_coef changes by at most about 20%."""

    reference_refresh_updates: int = 0
    """Copy the policy into the reference every this many updates; 0 never."""

    # --- Advantages ---

    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the batch; their mean is kept."""

    whiten_advantages: bool = True
    """Standardize advantages over the batch to mean 0 and standard deviation 1."""

    gamma: float = 1.0
    """Discount factor per token."""

    lam: float = 0.95
    """Lambda of generalized advantage estimation (arXiv:1506.02438)."""

    lam_critic: float | None = None
    """Lambda of the critic's targets (decoupled GAE, arXiv:2503.01491); None: `lam`."""

    # --- The losses ---

    cliprange: float = 0.2
    """Clip the probability ratio to [1 - cliprange, 1 + cliprange] (arXiv:1707.06347, eq. 7)."""

    cliprange_high: float | None = None
    """Upper bound of the ratio is 1 + cliprange_high (clip-higher, arXiv:2503.14476); None:
    `cliprange`."""

    dual_clip: float | None = None
    """Bound the loss of a token with negative advantage by dual_clip x |advantage|
    (arXiv:1912.09729, eq. 5). Must be above 1; None sets no bound."""

    loss_aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """Loss of an optimizer step: `token` is the mean over all tokens, `sequence` the mean over
    the responses' means, `fixed_length` the sum divided by responses x response_length
    (arXiv:2503.20783)."""

    vf_coef: float = 0.1
    """Weight of the value loss, relative to the policy loss."""

    cliprange_value: float = 0.2
    """Clip new values to at most this distance from the values at sampling time."""

    critic_learning_rate: float | None = None
    """Peak learning rate of the critic; None: `learning_rate`."""

    critic_warmup_updates: int = 0
    """Number of initial updates that train only the critic."""

    shared_critic: bool = False
    """Use a value head on the policy's backbone as the critic."""

    ptx_coef: float = 0.0
    """Weight of the language-modeling loss on pretraining texts (PPO-ptx, arXiv:2203.02155)."""

    ema_decay: float | None = None
    """Decay per update of an exponential moving average of the policy's weights. If set, the
    average is evaluated and saved instead of the trained weights. None keeps no average."""

    # --- When to stop, and when to warn ---

    target_kl: float | None = None
    """Stop the epochs over a batch once the policy has moved more than 1.5 x this many nats per
    token, over all processes; None never stops early."""

    ratio_threshold: float | None = None
    """Skip an optimizer step whose mean probability ratio exceeds this; None skips none."""

    max_skipped_steps: int = 3
    """Consecutive optimizer steps skipped for a non-finite loss or gradient after which the run
    fails."""

    warn_kl: float = 50.0
    """Warn when the KL divergence from the reference exceeds this many nats per response."""

    warn_ratio: float = 2.0
    """Warn when the mean probability ratio of an update is above this, or below 1/5 of its
    inverse."""

    warn_entropy: float = 0.05
    """Warn when the mean entropy of the policy falls below this many nats per token."""

    warn_explained_variance: float = -0.5
    """Warn when the critic explains less than this share of the variance of the returns."""

    warn_length_growth: float = 2.0
    """Warn when the mean response is this many times as long as in the first update."""

    warn_repetition: float = 0.5
    """Warn when more than this share of 3-grams in responses are repeats."""

    # --- Samples, and what scripts around the trainer read ---

    num_sample_generations: int = 10
    """Number of times in a run that the evaluation prompts are answered and printed as a table."""

    sft_model_path: str | None = None
    """Folder or hub id of the initial policy; read by `python -m ppo_core` and scripts."""

    reward_model_path: str | None = None
    """Folder or hub id of the reward model; read by `python -m ppo_core` and scripts."""

    model_adapter_name: str | None = None
    """Name of the PEFT adapter to train, if the policy has several; None: the active one."""

    ref_adapter_name: str | None = None
    """Name of the PEFT adapter that is the reference; None: the base model without adapters."""

    ds3_gather_for_generation: bool = True
    """With sharded weights (zero3, fsdp2), gather them once per rollout, which is far faster.
    False gathers layer by layer in each forward pass, for policies too large for one process."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        _check_types(self)
        _check_ranges(self)
        _check_choices(self)
        _check_combinations(self)


def _check_types(config: PPOConfig) -> None:
    """Raise if a number is not a finite number, or a switch not a bool."""
    for name, hint in get_type_hints(PPOConfig).items():
        kinds = set(get_args(hint) or (hint,))
        value = getattr(config, name)
        if value is None and NoneType in kinds:
            continue
        if kinds & {int, float} and not kinds & {str}:
            wanted = (int, float) if float in kinds else int
            is_number = isinstance(value, wanted) and not isinstance(value, bool)
            unbounded = name == "max_grad_norm"
            holds = is_number and (isfinite(value) or unbounded)
            require(config, name, holds, "a number" if float in kinds else "a whole number")
        elif kinds - {NoneType} == {bool}:
            require(config, name, isinstance(value, bool), "True or False")


def _check_ranges(config: PPOConfig) -> None:
    for name in (
        "num_ppo_epochs num_mini_batches per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps local_rollout_forward_batch_size response_length kl_horizon "
        "max_skipped_steps ddp_timeout"
    ).split():
        require_count(config, name)
    for name in (
        "total_episodes batch_size max_tokens_per_microbatch save_total_limit dataset_num_proc"
    ).split():
        if getattr(config, name) is not None:
            require_count(config, name)
    if config.save_total_limit == 1:
        raise ConfigError(
            "save_total_limit=1 would leave no checkpoint to resume from if the only one is "
            "damaged. Set at least 2, or None to keep all."
        )
    for name in (
        "top_k overlong_buffer critic_warmup_updates reference_refresh_updates "
        "num_sample_generations"
    ).split():
        value = getattr(config, name)
        require(config, name, isinstance(value, int) and value >= 0, "a whole number, at least 0")
    for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
        value = getattr(config, name) or 0
        whole = 0 <= value < 1 or value == int(value)
        require(config, name, whole, "a whole number, or a share below 1")
    for name in (
        "temperature learning_rate adam_epsilon max_grad_norm num_train_epochs logging_steps "
        "save_steps warn_ratio warn_length_growth vllm_server_timeout"
    ).split():
        require(config, name, getattr(config, name) > 0, "above 0")
    for name in (
        "score_clip",
        "kl_target",
        "critic_learning_rate",
        "target_kl",
        "ratio_threshold",
        "cliprange_high",
        "eval_steps",
    ):
        value = getattr(config, name)
        require(config, name, value is None or value > 0, "above 0")
    for name in (
        "length_penalty overlong_penalty kl_coef cliprange cliprange_value vf_coef weight_decay "
        "ptx_coef"
    ).split():
        require(config, name, getattr(config, name) >= 0, "at least 0")
    require(config, "missing_eos_penalty", (config.missing_eos_penalty or 0) >= 0, "at least 0")
    for name in ("gamma", "lam", "warmup_ratio"):
        require(config, name, 0 <= getattr(config, name) <= 1, "between 0 and 1")
    require(config, "lam_critic", 0 <= (config.lam_critic or 0) <= 1, "between 0 and 1")
    require(config, "top_p", 0 < config.top_p <= 1, "above 0 and at most 1")
    for name in ("adam_beta1", "adam_beta2"):
        require(config, name, 0 <= getattr(config, name) < 1, "at least 0 and below 1")
    require(config, "ema_decay", 0 <= (config.ema_decay or 0) < 1, "at least 0 and below 1")
    require(config, "dual_clip", config.dual_clip is None or config.dual_clip > 1, "above 1")
    cap = config.vllm_importance_sampling_cap
    require(config, "vllm_importance_sampling_cap", cap >= 1, "at least 1")


def _check_choices(config: PPOConfig) -> None:
    hints = get_type_hints(PPOConfig)
    for name, hint in hints.items():
        choices = [choice for kind in (hint, *get_args(hint)) for choice in _literals(kind)]
        value = getattr(config, name)
        if choices and not (value is None and NoneType in get_args(hint)):
            require(config, name, value in choices, f"one of {', '.join(choices)}")


def _literals(kind: object) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _check_combinations(config: PPOConfig) -> None:
    if config.batch_size is not None and config.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"batch_size={config.batch_size} and gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps} both set the size of a batch. Set one of them."
        )
    if config.batch_size is not None and (left := config.batch_size % config.num_mini_batches):
        raise ConfigError(
            f"num_mini_batches={config.num_mini_batches} does not divide "
            f"batch_size={config.batch_size}: {left} responses would be dropped in every epoch. "
            "Choose a batch_size that is a multiple of num_mini_batches."
        )
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} both set "
            "the warm-up. Set one of them."
        )
    if config.lr_scheduler_type == "constant" and (config.warmup_steps or config.warmup_ratio):
        raise ConfigError(
            "lr_scheduler_type='constant' has no warm-up: warmup_steps and warmup_ratio would be "
            "ignored. Set lr_scheduler_type='constant_with_warmup'."
        )
    if config.missing_eos_penalty and config.stop_token is None and config.stop_token_id is None:
        raise ConfigError(
            f"missing_eos_penalty={config.missing_eos_penalty} with no stop token would be "
            "subtracted from every response. Set stop_token='eos' or stop_token_id."
        )
    if config.kl_target is not None and config.kl_coef == 0:
        raise ConfigError(
            f"kl_target={config.kl_target} adapts kl_coef by multiplication, so kl_coef=0 would "
            "stay 0. Set kl_coef above 0."
        )
    if config.use_score_norm and not config.use_score_scaling:
        raise ConfigError(
            "use_score_norm=True takes effect only with use_score_scaling=True. Set both."
        )
    if config.overlong_buffer > config.response_length:
        raise ConfigError(
            f"overlong_buffer={config.overlong_buffer} is longer than "
            f"response_length={config.response_length}: every response would be penalized. "
            "Set it to at most response_length."
        )
    if (config.top_k or config.top_p < 1) and config.kl_estimator == "k1":
        raise ConfigError(
            f"top_k={config.top_k}, top_p={config.top_p}: with restricted sampling the k1 estimate "
            "of the KL divergence is biased and may be negative. Set kl_estimator to full or k3."
        )
    if config.ref_adapter_name and config.ref_adapter_name == config.model_adapter_name:
        raise ConfigError(
            f"model_adapter_name and ref_adapter_name are both {config.ref_adapter_name!r}: the "
            "reference would follow the policy. Name two adapters."
        )
    _check_vllm(config)


def _check_vllm(config: PPOConfig) -> None:
    url = config.vllm_server_base_url
    is_root = url.startswith(("http://", "https://")) and not url.rstrip("/").endswith("/v1")
    require(config, "vllm_server_base_url", is_root, "http://HOST:PORT, without /v1")
    if config.use_vllm and config.vllm_weights_dir is None:
        raise ConfigError(
            "use_vllm=True needs vllm_weights_dir: the server reads the policy's weights from that "
            "folder, at the same path; without it the server would sample from its initial "
            "weights. On a single machine, set it for example to /dev/shm/weights."
        )
    names = [field.name for field in fields(config) if field.name.startswith("vllm_")]
    defaults = {field.name: field.default for field in fields(config)}
    changed = [name for name in names if getattr(config, name) != defaults[name]]
    if changed and not config.use_vllm:
        raise ConfigError(f"{changed[0]} takes effect only with use_vllm=True. Set both.")
