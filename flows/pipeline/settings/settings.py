"""Settings of a run of the flow, and the contradictions between them that are refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from pipeline.settings.evaluation_config import EvaluationConfig, SelectionConfig
from pipeline.settings.fresh_pairs_config import FreshPairsConfig
from pipeline.settings.gate_configs import PromotionConfig, RewardGateConfig
from pipeline.settings.hardware_config import HardwareConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.section_defaults import UNKNOWN_SIZE, WARN_SHARE, section_defaults
from pipeline.settings.training_sections import LoraConfig, RewardTrainingSection, SupervisedSection
from ppo_core.config.field_checks import check_fields
from ppo_core.config.placement import Precision
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.reward_names import (
    OWN,
    NamedReward,
    disagreement_names,
    read_rewards,
    same_place,
)
from ppo_core.config.row_settings import MAX_LEFT_OUT, Overlong, PromptFormat, check_columns
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Natural, NotNegative, Positive, Seed, Share, ShareBelow1

NOT_OF_THE_FLOW = {
    "output_dir": "set output_dir of the run",
    "logging_steps": "every update is logged",
    "max_steps": "set total_episodes, the responses of PPO",
    "mini_batch_size": "set num_mini_batches",
    "num_sample_generations": "the flow keeps answers to eight training prompts for its page",
    "save_strategy": "a retried PPO step resumes from its checkpoints",
    "eval_strategy": "the flow judges the policy after training, see [evaluation]",
    "push_to_hub": "the policy goes to MLflow, as registered_model",
    "hub_model_id": "the policy goes to MLflow, as registered_model",
    "hub_private_repo": "the policy goes to MLflow, as registered_model",
    "sft_model_path": "set policy of the run",
    "reward_model_path": "set reward_model of the run",
    "ptx_coef": "the flow has no pretraining texts",
    "model_adapter_name": "the flow makes the adapter itself, see [lora]",
    "ref_adapter_name": "the reference is the policy before PPO",
    "warn_kl_note": "the flow writes this note itself, with promotion.max_kl",
}
"""Setting of PPO that the flow refuses, because the flow decides it -> the reason, or the setting
to use instead."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run, which decide what the run does.

    Raises:
        ConfigError: an input is missing, or two settings contradict each other.
    """

    task: Literal["", "tldr"] = ""
    """Built-in task, which generates all inputs; if empty, the run uses your own inputs."""

    policy: str = ""
    """Folder or hub id of the causal language model to improve; a hub id may name a revision, as in
    `org/name@revision`."""

    sft_data: str = ""
    """Rows with prompt and completion, to fine-tune `policy` before PPO; if empty, `policy` is not
    fine-tuned."""

    reward_model: str = ""
    """Folder or hub id of a reward model with one label, in the same form as `policy`. If empty, a
    reward model is trained from the policy."""

    rewards: list[str] = field(default_factory=list)
    """Rewards whose sum, weighted by `ppo.reward_weights`, trains the policy: `reward-model` (the
    setting `reward_model`, or the model that the run trains), `reward-model:PATH`,
    `python:FILE_OR_MODULE:FUNCTION`, or `openai:MODEL` and `transformers:PATH`, language models
    that score by `rewards_rubric`; each with or without `NAME=` before it. If empty, the reward
    model of the run is the only reward. This model is validated even if the list leaves it out or
    its weight is 0; in these cases a failed validation does not end the run."""

    rewards_rubric: str = ""
    """Text file, such as Markdown, with the rubric by which language models in `rewards` score each
    response from 1 to 10. The settings of [judging] apply when these models are asked. `max_calls`
    and `max_tokens` limit all questions of one training; each process has an equal share."""

    model_types: list[str] = field(default_factory=list)
    """Model types of transformers that `policy`, reward models and judges may have, as in
    `["llama", "deberta-v2"]`. If empty, the types that passed `make architectures` are allowed,
    and for reward models also encoders; see ppo_core/models/files/model_types.py."""

    preferences: str = ""
    """Rows with chosen, rejected and optionally prompt, to train the reward model on; if `judge` is
    empty, also to train the judge on."""

    preferences_test: str = ""
    """Preferences to validate the reward model on; if empty, the fraction `held_out_share` of
    `preferences` is held out."""

    feedback: str = ""
    """Rows with prompt, and with a response that users liked (chosen), one that they disliked
    (rejected), or both responses; `flows/feedback.py collect` writes such rows. They train the
    reward model beside `preferences`; a row with one response judges this response alone."""

    feedback_weight: Annotated[float, Field(gt=0, description="above 0")] = 1.0
    """Weight of a row of `feedback` in the loss of the reward model, if a pair of `preferences` has
    weight 1. It is multiplied by the column `weight` of the row, if there is one."""

    held_out_share: Annotated[float, Field(gt=0, lt=1, description="between 0 and 1")] = 0.1
    """Fraction of the rows to hold out, taken from the end: of `preferences` if `preferences_test`
    is empty, and of `prompts` if `eval_prompts` is empty. All pairs of one prompt are held out, or
    none."""

    start_from: Literal["", "champion"] = ""
    """Where the reward model and the critic start: with `champion`, from the reward model and the
    critic of the run that made the champion of `registered_model`; if empty, from the policy. With
    `champion`, each version keeps both models for the next run; see docs/retraining.md. Policy and
    reference always start from `policy`."""

    prompts: str = ""
    """Rows with prompt and optionally reference; PPO trains on the prompts."""

    eval_prompts: str = ""
    """Rows with the prompts of the evaluation; either all rows or no rows have a reference. If
    empty, the last rows of `prompts` are held out: the fraction `held_out_share`, but at most
    `evaluation.num_examples` rows, and `selection.num_prompts` more if the judge chooses the
    policy."""

    max_overlap: Share = 0.5
    """A prompt of the evaluation is left out if more than this fraction of its 3-grams of words is
    in one training text, or if it equals a training text apart from case and punctuation. N-grams
    of templates do not count. Short prompts are kept; docs/judge-and-win-rate.md says how short. 1
    leaves no prompt out."""

    erase: str = ""
    """Data set of the rows to remove from all data sets. Each row has the columns of the row to
    remove; a row with only a prompt removes all rows with that prompt. If empty, no row is
    removed."""

    prompt_format: PromptFormat = "auto"
    """Format in which the policy reads prompts in every step: `chat` applies the tokenizer's chat
    template, `text` does not, and `auto` applies it if there is one."""

    columns: dict[str, str] = field(default_factory=dict)
    """Names of columns that differ from the standard names, as in `prompt = "post"`. An entry is
    ignored for a data set without the named column."""

    overlong: Overlong = "drop"
    """What happens to a row that is too long for the model: `error` stops, `drop` leaves the row
    out (see `max_left_out`), `truncate` removes the start of the prompt."""

    max_left_out: ShareBelow1 = MAX_LEFT_OUT
    """Maximum fraction of the rows of a data set that may be left out because they cannot be used
    or are too long; above it, the run stops. With 0, no row may be left out."""

    allow_data_urls: bool = False
    """Whether data sets may be addresses such as https://...; the owner of the address then decides
    on the training data. Redirects are not followed. Addresses in S3, s3://..., are always
    allowed."""

    judge: str = ""
    """Judge that compares two answers: openai:MODEL, transformers:PATH, reward-model:PATH,
    python:FILE_OR_MODULE:FUNCTION or rule (the built-in task's judge). Several judges, joined by
    commas, vote. If empty, the judge is a reward model that is trained on a third of `preferences`;
    this third does not train PPO's reward model. With a given `reward_model`, all `preferences`
    train the judge."""

    accept_reward_model: bool = False
    """Whether to train against a reward model that the gate refuses; the run records this."""

    registered_model: str = "rlhf-policy"
    """Name under which the policy is registered in MLflow."""

    output_dir: str = "outputs"
    """Folder for the cache and for the files of each run."""

    store: str = ""
    """Address in S3, s3://BUCKET/PREFIX, through which the steps share the files of output_dir. If
    empty, steps on AWS Batch or Kubernetes use a folder of Metaflow's data store. `none` means that
    all machines have output_dir on a shared disk."""

    summary_json: str = ""
    """File for the summary of the run; empty for none."""

    seed: Seed = 1
    """Seed of all random numbers in the run; a section with a `seed` uses its own seed instead."""

    processes: Natural = 0
    """Number of processes of each training on one machine. 0 starts one process per GPU, or one
    process on a machine without a GPU."""

    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Number of machines that share each training; Metaflow's @parallel starts them. This setting
    is read from the settings file only."""

    precision: Precision = "auto"
    """Precision of language models in steps that sample, answer or judge but do not train: `fp32`,
    `bf16`, or `auto`, which is bf16 on a GPU that computes in bf16, else fp32. Reward models score
    in fp32."""

    stall_minutes: Positive = 30.0
    """A training or a step of the flow is ended after this number of minutes without progress (an
    optimizer step, an answer, a verdict), or after 20 times its median wait, whichever is longer.
    The training is retried from its last checkpoint."""

    step_minutes: NotNegative = 0.0
    """Time limit in minutes of each step; suspensions of more than a minute do not count; 0 for no
    limit. In the step `start`, it only limits the trials of judges, rewards and guards."""

    sft: SupervisedSection = field(
        default_factory=lambda: SupervisedSection(**section_defaults(UNKNOWN_SIZE)["sft"])
    )
    """Settings for fine-tuning the policy on `sft_data`."""

    reward_model_training: RewardTrainingSection = field(
        default_factory=lambda: RewardTrainingSection(
            **section_defaults(UNKNOWN_SIZE)["reward_model_training"]
        )
    )
    """Settings for training the reward model; `end_of_text` also applies when the model scores."""

    ppo: PPOConfig = field(
        default_factory=lambda: PPOConfig(**section_defaults(UNKNOWN_SIZE)["ppo"])
    )
    """Settings of PPO."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that PPO trains instead of all parameters."""

    fresh_pairs: FreshPairsConfig = field(default_factory=FreshPairsConfig)
    """Labeled pairs of the policy's own samples, for the training of the reward model."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Choice of the policy to evaluate and register: the last one, an earlier one, or a mix."""

    reward_gate: RewardGateConfig = field(default_factory=RewardGateConfig)
    """Limits that a reward model must meet before PPO trains against it."""

    judging: JudgingConfig = field(default_factory=JudgingConfig)
    """Settings of judges that are chat models."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Settings for comparing the policies."""

    promotion: PromotionConfig = field(default_factory=PromotionConfig)
    """Limits that a policy must meet to become the champion."""

    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """GPUs of the run and prices, for computed and measured cost."""

    def __post_init__(self) -> None:
        """Raise if inputs are missing or settings contradict each other."""
        check_fields(self)
        check_columns(self.columns)
        self._refuse_what_the_flow_decides()
        self._refuse_a_reference_without_weights()
        self._refuse_a_late_kl_warning()
        self._refuse_prices_of_no_judge()
        self._refuse_a_choice_without_divergence()
        self._check_rewards()
        self._check_fresh_pairs()
        self._refuse_feedback_without_training()
        self._check_start()
        if self.task:
            self._refuse_inputs_of_a_task()
        else:
            self._require_inputs()
            self._refuse_a_rotation_without_rows()

    @property
    def uses_reward_model(self) -> bool:
        """Whether the reward model of the run is among `rewards` with a weight other than 0."""
        named = read_rewards(self.rewards or [OWN])
        weights = self.ppo.reward_weights or [1.0] * len(named)
        return any(one.is_own and weight for one, weight in zip(named, weights, strict=True))

    def _refuse_what_the_flow_decides(self) -> None:
        for name, instead in NOT_OF_THE_FLOW.items():
            value = getattr(self.ppo, name)
            if value != getattr(PPOConfig, name):
                raise ConfigError(f"ppo.{name}={value!r} would be ignored: {instead}.")

    def _refuse_a_reference_without_weights(self) -> None:
        if self.lora.r and self.ppo.reference_refresh_updates:
            raise ConfigError(
                f"ppo.reference_refresh_updates={self.ppo.reference_refresh_updates} copies the "
                f"policy into the reference, but with lora.r={self.lora.r} the reference is the "
                "policy without its adapter, with no weights to copy into. Remove either setting."
            )

    def _refuse_a_late_kl_warning(self) -> None:
        warn_kl, max_kl = self.ppo.warn_kl, self.promotion.max_kl
        if warn_kl >= max_kl:
            raise ConfigError(
                f"ppo.warn_kl={warn_kl:g} must be below promotion.max_kl={max_kl:g}: the warning "
                "would come after the promotion is lost. Remove warn_kl, whose default is "
                f"{WARN_SHARE:g} x max_kl, or raise max_kl."
            )

    def _refuse_a_choice_without_divergence(self) -> None:
        method, evaluation = self.selection.method, self.evaluation
        if self.ppo.save_policies and method != "judge":
            raise ConfigError(
                f"ppo.save_policies={self.ppo.save_policies} saves policies that nothing uses, "
                f"because selection.method={method!r} compares no earlier policies. Set "
                "selection.method='judge', or remove save_policies."
            )
        if method == "last":
            return
        if not evaluation.temperature or evaluation.top_k or evaluation.top_p < 1:
            raise ConfigError(
                f"selection.method={method!r} needs the KL divergence of the answers, which cannot "
                f"be estimated with evaluation.temperature={evaluation.temperature:g}, "
                f"top_k={evaluation.top_k} and top_p={evaluation.top_p:g}. Set a temperature above "
                "0, top_k=0 and top_p=1, or selection.method='last'."
            )
        if self.ppo.kl_target and evaluation.temperature != self.ppo.temperature:
            raise ConfigError(
                f"selection.method={method!r} compares the KL divergence of answers at "
                f"evaluation.temperature={evaluation.temperature:g} with ppo.kl_target, which is "
                f"meant at ppo.temperature={self.ppo.temperature:g}. Set equal temperatures."
            )
        if method == "kl" and self.ppo.kl_target is None and math.isinf(self.promotion.max_kl):
            raise ConfigError(
                "selection.method='kl' has no limit to keep: promotion.max_kl is infinite, and "
                "ppo.kl_target is not set. Set one of them, or selection.method='last'."
            )

    def _refuse_a_rotation_without_rows(self) -> None:
        if self.evaluation.rotate and not self.eval_prompts:
            raise ConfigError(
                f"evaluation.rotate={self.evaluation.rotate:g} draws prompts from the rows of "
                "eval_prompts that are not judged otherwise. Without eval_prompts, no more than "
                f"evaluation.num_examples={self.evaluation.num_examples} rows of prompts are held "
                "out, so none is left to draw. Name eval_prompts, or remove rotate."
            )

    def _refuse_prices_of_no_judge(self) -> None:
        named = f"{self.judge},{self.fresh_pairs.judge}"
        judges = {part.strip() for part in named.split(",")}
        judges |= {f"{one.kind}:{one.source}" for one in read_rewards(self.rewards)}
        for name in self.hardware.judge_prices:
            if name not in judges or not name.startswith("openai:"):
                raise ConfigError(
                    f"hardware.judge_prices.{name!r} would be ignored: no judge, labeler or reward "
                    f"of this run is a server of this name (judge={self.judge!r}, "
                    f"fresh_pairs.labeller={self.fresh_pairs.labeller!r}, rewards={self.rewards}). "
                    "Write the name as there, openai:MODEL, or remove the price."
                )

    def _check_rewards(self) -> None:
        rewards, weights = read_rewards(self.rewards), self.ppo.reward_weights
        names = [one.name for one in rewards] or [OWN]
        if weights is not None and len(weights) != len(names):
            raise ConfigError(
                f"ppo.reward_weights={weights} has {len(weights)} numbers for {len(names)} rewards "
                f"({', '.join(names)}). Set one number for each entry of rewards."
            )
        self._check_language_models(rewards)
        self._check_members(rewards)
        for one in rewards:
            is_model = one.kind == "reward-model" and not one.is_own
            if is_model and same_place(one.source, self.reward_model):
                raise ConfigError(
                    f"rewards names {one.spec!r}, which is the reward_model of the run. Write "
                    f"{OWN}, whose scores the run centers."
                )

    def _check_language_models(self, rewards: Sequence[NamedReward]) -> None:
        named = [one.spec for one in rewards if one.is_language_model]
        if named and not self.rewards_rubric:
            raise ConfigError(
                f"rewards names {named[0]!r}, a language model, and no rubric says what it scores. "
                "Write a text file with the rubric, and set rewards_rubric to it."
            )
        if self.rewards_rubric and not named:
            raise ConfigError(
                f"rewards_rubric={self.rewards_rubric!r} would be ignored, because rewards="
                f"{self.rewards} has no language model. Add openai:MODEL or transformers:PATH to "
                "rewards, or remove the rubric."
            )
        if named and self.num_nodes > 1:
            raise ConfigError(
                f"rewards names {named[0]!r}, a language model, and num_nodes={self.num_nodes}: "
                "only the processes of one machine share the limits of [judging]. Set num_nodes=1, "
                "or ask the model in a function, python:FILE_OR_MODULE:FUNCTION."
            )

    def _check_members(self, rewards: Sequence[NamedReward]) -> None:
        members = self.reward_model_training.members
        if members > 1 and self.reward_model and not self.fresh_pairs.wanted:
            raise ConfigError(
                f"reward_model_training.members={members} would be ignored, because no reward "
                f"model is trained beside reward_model={self.reward_model!r}. Remove either "
                "setting."
            )
        if members > 1:
            is_own = {one.name: one.is_own for one in rewards} or {OWN: True}
            disagreement_names(is_own, [name for name, own in is_own.items() if own])

    def _check_fresh_pairs(self) -> None:
        fresh = self.fresh_pairs
        if fresh.given_weight and self.reward_model:
            raise ConfigError(
                f"fresh_pairs.given_weight={fresh.given_weight:g} would be ignored, because the "
                f"given pairs train no model beside reward_model={self.reward_model!r}. Remove "
                "either setting."
            )
        if fresh.rounds == 1:
            return
        if not self.uses_reward_model:
            raise ConfigError(
                f"fresh_pairs.rounds={fresh.rounds} trains reward models from which PPO does not "
                f"learn, because rewards={self.rewards} leaves {OWN} out or weighs it with 0. Give "
                f"{OWN} a weight, or set rounds=1."
            )
        if self.num_nodes > 1:
            raise ConfigError(
                f"fresh_pairs.rounds={fresh.rounds} pauses PPO on one machine only, and "
                f"num_nodes={self.num_nodes}. Set rounds=1 or num_nodes=1."
            )

    def _refuse_feedback_without_training(self) -> None:
        if self.feedback and self.reward_model:
            raise ConfigError(
                f"feedback={self.feedback!r} would be ignored, because reward_model="
                f"{self.reward_model!r} is not trained. Remove either setting."
            )
        if not self.feedback and self.feedback_weight != Settings.feedback_weight:
            raise ConfigError(
                f"feedback_weight={self.feedback_weight:g} would be ignored, because there is no "
                "feedback. Set feedback to its file, or remove feedback_weight."
            )

    def _check_start(self) -> None:
        if not self.start_from:
            return
        reasons = (
            (
                f"reward_model={self.reward_model!r}",
                bool(self.reward_model),
                "this reward model is not trained",
            ),
            (
                f"fresh_pairs.count={self.fresh_pairs.count}"
                if self.fresh_pairs.count
                else f"fresh_pairs.labels={self.fresh_pairs.labels!r}",
                self.fresh_pairs.wanted,
                "no version lists the pairs of samples that trained its reward model, so pairs "
                "that are held out now may be among them",
            ),
            (
                f"ppo.advantage_estimator={self.ppo.advantage_estimator!r}",
                not self.ppo.has_critic,
                "there is no critic",
            ),
            (
                "ppo.shared_critic=true",
                self.ppo.shared_critic,
                "the critic is a head on the policy, which starts from SFT",
            ),
        )
        for setting, is_given, reason in reasons:
            if is_given:
                raise ConfigError(
                    f"start_from={self.start_from!r} cannot be used with {setting}: {reason}. "
                    "Remove either setting."
                )

    def _refuse_inputs_of_a_task(self) -> None:
        named = [name for name in INPUTS if getattr(self, name)]
        if named:
            raise ConfigError(
                f"task='{self.task}' generates all inputs, so {_listed(named)} would be "
                "ignored. Remove either the task or these settings."
            )

    def _require_inputs(self) -> None:
        needed = ["policy", "preferences", "prompts"]
        missing = [name for name in needed if not getattr(self, name)]
        if self.reward_model and self.preferences_test:
            missing = [name for name in missing if name != "preferences"]
        if missing:
            raise ConfigError(
                f"{_listed(missing)} missing: a run on your own data needs {_listed(needed)}. "
                f"Name them on the command line (--{missing[0]} NAME) or in the settings file, "
                "or name no input and set task='tldr' to run the built-in task."
            )
        if not (self.judge or self.preferences):
            raise ConfigError(
                "judge missing: with a reward_model and without preferences, there are no pairs to "
                "train a judge on. Name a judge (--judge), or preferences to train one on "
                "(--preferences)."
            )


INPUTS = (
    "policy",
    "sft_data",
    "reward_model",
    "preferences",
    "preferences_test",
    "feedback",
    "prompts",
    "eval_prompts",
    "erase",
)


def _listed(names: list[str]) -> str:
    return ", ".join(names)
