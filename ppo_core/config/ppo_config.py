"""Settings of the trainings: frozen, checked once, when they are made."""

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
    """Everything that decides what PPO does, apart from the models and the prompts.

    Names are those of TRL's PPO (1.12 and the classic one); defaults are those of "The N+
    Implementation Details of RLHF with PPO" (arXiv:2403.17031). What is not in those two is off.

    Raises:
        ConfigError: a value is out of range, two values contradict each other, or a name of
            `transformers.TrainingArguments` or of TRL is given that PPO here does not honour.
    """

    # --- How much, and in which portions ---

    total_episodes: int | None = None
    """Responses to sample in the whole run, rounded up to whole updates; None takes
    `num_train_epochs` passes over the prompts."""

    batch_size: int | None = None
    """Responses sampled for one PPO update, over all processes. None takes
    per_device_train_batch_size x gradient_accumulation_steps x processes."""

    num_ppo_epochs: int = 4
    """Passes over each batch of responses."""

    num_mini_batches: int = 1
    """Optimizer steps in one pass; must divide the batch."""

    max_tokens_per_microbatch: int | None = None
    """Tokens in one forward and backward pass of one process over prompts and responses, fillers
    included; None takes as many as `per_device_train_batch_size` of the longest rows have. Memory
    grows with it. Pretraining texts go by rows all the same."""

    local_rollout_forward_batch_size: int = 64
    """Prompts sampled, or responses scored, together by one process; memory grows with it,
    results do not depend on it."""

    # --- Sampling ---

    response_length: int = 53
    """Most tokens of a response, the stop token included."""

    temperature: float = 0.7
    """The policy is softmax(logits / temperature), in sampling and in training alike."""

    top_k: int = 0
    """Sample from the k likeliest tokens alone; 0 from all. The loss corrects for it."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this probability; 1 from all. As `top_k`."""

    stop_token: Literal["eos"] | None = "eos"
    """Ends a response: the tokenizer's end-of-sequence token, or nothing."""

    stop_token_id: int | None = None
    """Token that ends a response, in the place of `stop_token`."""

    use_vllm: bool = False
    """Have a vLLM server sample the responses, with the policy's weights of the moment
    (docs/vllm.md); evaluations are sampled here."""

    vllm_importance_sampling_cap: float = 2.0
    """Largest weight of a token in the loss where the server's probability of it is not the
    policy's: min(policy / server, cap), truncated importance sampling."""

    # --- The reward of a response ---

    missing_eos_penalty: float | None = None
    """Subtracted from the score of a response that has no stop token."""

    length_penalty: float = 0.0
    """Subtracted from the score for each token of a response."""

    overlong_buffer: int = 0
    """The last tokens of `response_length` in which a penalty grows from 0 to
    `overlong_penalty` (arXiv:2503.14476, eq. 13); 0 for none."""

    overlong_penalty: float = 1.0
    """The penalty of a response that fills `response_length`, if there is an overlong_buffer."""

    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""

    use_score_norm: bool = False
    """Take their running mean off first; needs use_score_scaling."""

    reward_weights: list[float] | None = None
    """Weights of several rewards, in their order; None weighs each by 1."""

    score_clip: float | None = None
    """Clip scores to -score_clip .. score_clip, after scaling."""

    # --- The divergence from the reference ---

    kl_coef: float = 0.05
    """Weight of the KL divergence from the reference, per token; where it adapts, the first."""

    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """How that divergence is estimated at a token (http://joschu.net/blog/kl-approx.html)."""

    kl_in_loss: bool = False
    """Put the divergence into the loss and not into the reward. Use k2 or full: the expected
    gradient of k1 in the loss is 0, and that of k3 is the other direction's
    (`ppo_core.algorithm.kl`)."""

    kl_target: float | None = None
    """Nats a response that kl_coef is adapted to (arXiv:1909.08593, section 2.2); None: fixed."""

    kl_horizon: int = 10_000
    """Episodes over which an adapted kl_coef changes by about a fifth at most."""

    reference_refresh_updates: int = 0
    """Updates after which the reference becomes a copy of the policy; 0 never."""

    # --- Advantages ---

    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation over the batch; the mean is kept."""

    whiten_advantages: bool = True
    """Standardise the advantages over the batch: mean 0, standard deviation 1."""

    gamma: float = 1.0
    """Discount per token."""

    lam: float = 0.95
    """Lambda of generalized advantage estimation."""

    lam_critic: float | None = None
    """Lambda of the critic's targets (decoupled GAE, arXiv:2503.01491); None takes `lam`."""

    # --- The losses ---

    cliprange: float = 0.2
    """The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."""

    cliprange_high: float | None = None
    """The upper side on its own (clip-higher, arXiv:2503.14476); None takes `cliprange`."""

    dual_clip: float | None = None
    """With a negative advantage the loss is at most dual_clip x |advantage|
    (arXiv:1912.09729, eq. 5); above 1, None for no bound."""

    loss_aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """Mean over all tokens of a step, or over its responses' own means, or the sum divided by
    responses x response_length (arXiv:2503.20783)."""

    vf_coef: float = 0.1
    """Weight of the value loss beside the policy loss."""

    cliprange_value: float = 0.2
    """A new value is clipped to this distance from the value at sampling time."""

    critic_learning_rate: float | None = None
    """Peak learning rate of the critic; None takes `learning_rate`."""

    critic_warmup_updates: int = 0
    """First updates in which the critic alone learns."""

    shared_critic: bool = False
    """The critic is a value head on the policy's own backbone."""

    ptx_coef: float = 0.0
    """Weight of the language-modelling loss on pretraining texts (PPO-ptx, arXiv:2203.02155)."""

    ema_decay: float | None = None
    """Decay per update of a running mean of the policy's weights, which is then what is
    evaluated and saved; None keeps no mean."""

    # --- When to stop, and when to warn ---

    target_kl: float | None = None
    """Passes over a batch end when the policy has moved 1.5 x this many nats a token; all
    processes agree on it."""

    ratio_threshold: float | None = None
    """An optimizer step whose mean probability ratio is above it is skipped."""

    max_skipped_steps: int = 3
    """Optimizer steps in a row that end the run when all are skipped: for a non-finite score, loss
    or gradient, or by `ratio_threshold`."""

    warn_kl: float = 50.0
    """Warn when a response is further than this many nats from the reference."""

    warn_ratio: float = 2.0
    """Warn when the mean ratio of an update is above this, or below a fifth of its inverse."""

    warn_entropy: float = 0.05
    """Warn when the entropy of the next token falls below this share of the first update's.

    A share, since a healthy number of nats depends on the texts: answers of a few likely tokens
    have a hundredth of the entropy of a story."""

    warn_explained_variance: float = -0.5
    """Warn when the critic explains less than this share of the returns' variance."""

    warn_length_growth: float = 2.0
    """Warn when responses are this many times as long as in the first update."""

    warn_repetition: float = 0.5
    """Warn when this share of the 3-grams of the responses are repeats."""

    # --- Samples, and what scripts around the trainer read ---

    num_sample_generations: int = 10
    """Times in a run that the evaluation prompts are answered and shown as a table."""

    sft_model_path: str | None = None
    """The policy to start from, as `python -m ppo_core` and scripts read it."""

    reward_model_path: str | None = None
    """The reward model, as `python -m ppo_core` and scripts read it."""

    model_adapter_name: str | None = None
    """PEFT adapter that is trained, where the policy has several; None takes the active one."""

    ref_adapter_name: str | None = None
    """PEFT adapter that is the reference; None is the base model without adapters."""

    ds3_gather_for_generation: bool = True
    """Where weights are sharded (zero3, fsdp2), gather them once for a rollout, which is far
    faster. False gathers layer by layer in each pass, for a policy that one process cannot hold."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded."""
        _check_types(self)
        _check_ranges(self)
        _check_choices(self)
        _check_combinations(self)


def _check_types(config: PPOConfig) -> None:
    """Refuse text where a number belongs, and numbers that are not finite."""
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
            "save_total_limit=1 would leave nothing to go back to where the only checkpoint is "
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
            f"batch_size={config.batch_size}: {left} responses would be dropped in every pass. "
            "Choose a batch_size that is a multiple of it."
        )
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} both set "
            "the warm-up. Set one of them."
        )
    if config.lr_scheduler_type == "constant" and (config.warmup_steps or config.warmup_ratio):
        raise ConfigError(
            "lr_scheduler_type='constant' has no warm-up, and the one that is set would be ignored."
            " Set lr_scheduler_type='constant_with_warmup'."
        )
    if config.missing_eos_penalty and config.stop_token is None and config.stop_token_id is None:
        raise ConfigError(
            f"missing_eos_penalty={config.missing_eos_penalty} with no stop token would be "
            "subtracted from every response. Set stop_token='eos' or stop_token_id."
        )
    if config.kl_target is not None and config.kl_coef == 0:
        raise ConfigError(
            f"kl_target={config.kl_target} adapts kl_coef by factors, and from kl_coef=0 it would "
            "stay 0. Set kl_coef above 0."
        )
    if config.use_score_norm and not config.use_score_scaling:
        raise ConfigError(
            "use_score_norm=True takes effect only with use_score_scaling=True. Set both."
        )
    if config.overlong_buffer > config.response_length:
        raise ConfigError(
            f"overlong_buffer={config.overlong_buffer} is longer than "
            f"response_length={config.response_length}: every response would be penalised."
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
            "use_vllm=True needs vllm_weights_dir: the server reads the policy's weights from a "
            "folder that it sees at the same path, and without one it would sample from its own. "
            "Set it, on one machine for example to /dev/shm/weights."
        )
    names = [field.name for field in fields(config) if field.name.startswith("vllm_")]
    defaults = {field.name: field.default for field in fields(config)}
    changed = [name for name in names if getattr(config, name) != defaults[name]]
    if changed and not config.use_vllm:
        raise ConfigError(f"{changed[0]} takes effect only with use_vllm=True. Set both.")
