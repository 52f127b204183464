"""The trainer with the arguments and methods of TRL's PPOTrainer."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import Collator, make_prompt_set, make_run_prompts
from ppo_core.ppo.ptx import make_pretraining_texts
from ppo_core.reporting.callbacks import CallbackOrType
from ppo_core.reporting.metrics import Metrics
from ppo_core.training.model_setup import join_processes, set_up_models
from ppo_core.training.script_models import require_loaded
from ppo_core.trl.script_names import PolicyAndValue, ScriptNames, add_computed, with_older_names
from ppo_core.trl.script_settings import protect_copy, refuse_late_changes


class PPOTrainer(ScriptNames):
    """Trains a policy with PPO to increase rewards; a KL term keeps the policy near a reference.

    The constructor does not change memory settings. To set them as `python -m ppo_core` does on a
    CPU, first call `ppo_core.models.kernels.cpu_memory.prepare_cpu_process()`.

    Args:
        args: the settings.
        processing_class: the policy's tokenizer. A pad token is not necessary.
        model: the policy, trained in place: a causal language model, with or without a value
            head, or a PeftModel.
        ref_model: the reference. If None, it is a copy of the policy or, if the policy has an
            adapter, the policy's base model.
        reward_model: a `RewardModel`, a `...ForSequenceClassification`, another module
            (`ppo_core.models.script_modules`), or a function; or several of them as a list or a
            dict. A function takes prompts and responses, and columns by keyword.
        train_dataset: prompts as a list, or a data set with the column "prompt" (text or chat
            messages), "messages" or "input_ids", and columns that reward functions take.
        value_model: the critic: a `...ForSequenceClassification`, a `Critic` or another module that
            returns a value for each token. It is trained in place. If None, the critic is the
            policy's value head, or with `shared_critic` a new value head on the policy. In all
            other cases, the critic is a copy of the reward model or, if the reward model cannot
            be copied, of the policy's backbone.
        data_collator: function that takes a list of one row and returns the row's "input_ids"; for
            rows without the columns "prompt", "messages" and "input_ids".
        eval_dataset: prompts for evaluations, and for tables of sample completions.
        optimizers: optimizer and learning-rate scheduler; (None, None) makes AdamW and the
            schedule of the settings.
        callbacks: transformers' callbacks; a step of a callback is one PPO update.
        peft_config: settings of an adapter to add to `model`; the other weights of the policy are
            then not trained.
        pretrain_dataset: texts for `ptx_coef`.

    Raises:
        ConfigError: settings contradict each other, the models, or the data sets.
        ModelError: a model cannot be used as policy, reference, critic or reward.
        DataError: a prompt cannot be used.
    """

    @with_older_names
    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: nn.Module,
        ref_model: PreTrainedModel | None,
        reward_model: Any,
        train_dataset: Any,
        value_model: nn.Module | None = None,
        data_collator: Collator | None = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[CallbackOrType] | None = None,
        peft_config: Any = None,
        *,
        pretrain_dataset: Any = None,
    ) -> None:
        """Check models, prompts and settings, and set up the run."""
        require_loaded(model, ref_model=ref_model, value_model=value_model)
        self._given_args, self._args_before = args, asdict(args)
        config, engine = join_processes(args, model, peft_config)
        models = set_up_models(
            config,
            processing_class,
            engine,
            policy=model,
            reference=ref_model,
            critic=value_model,
            reward=reward_model,
            peft_config=peft_config,
        )
        policy = models.policy.model
        critic = models.critic if value_model is None else value_model
        self.model = PolicyAndValue(models.adapted or policy, critic)
        self.ref_model = ref_model
        if ref_model is None and not models.shares_weights:
            self.ref_model = models.reference.model
        self.reward_model = reward_model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._collator = data_collator
        asked = models.rewards.asked_columns()
        prompts = make_run_prompts(
            train_dataset, eval_dataset, processing_class, policy, config, data_collator, asked
        )
        texts = make_pretraining_texts(pretrain_dataset, processing_class, policy.config, config)
        super().__init__(
            config,
            models,
            prompts,
            engine=engine,
            callbacks=callbacks or (),
            callback_model=self.model,
            optimizers=optimizers,
            pretraining=texts,
        )
        add_computed(self.args, self._reporter.args, self.schedule, engine)
        protect_copy(self.args, args)

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        *,
        resume_anyway: bool = False,
        stop_after_updates: int | None = None,
    ) -> list[Metrics]:
        """Run all remaining updates, like `Trainer.train`; return the metrics of each update.

        Raises:
            ConfigError: the settings were changed after the trainer was made.
        """
        refuse_late_changes(self._given_args, self._args_before)
        return super().train(
            resume_from_checkpoint,
            resume_anyway=resume_anyway,
            stop_after_updates=stop_after_updates,
        )

    def evaluate(self, eval_dataset: Any = None) -> Metrics:
        """Answer prompts greedily and score them; log and return the mean score "eval/scores".

        Raises:
            ConfigError: neither this method nor the trainer was given an `eval_dataset`.
        """
        if eval_dataset is None:
            return super().evaluate()
        policy, asked = self.policy.model, self.rewards.asked_columns()
        prompts = make_prompt_set(
            eval_dataset, self.tokenizer, policy, self.args, self._collator, asked
        )
        return self._evaluate(prompts)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write README.md into `output_dir`, with the settings and the last metrics."""
        self._files.write_card(model_name=model_name, dataset_name=dataset_name, tags=tags)

    def push_to_hub(self, commit_message: str = "PPO", **details: Any) -> str | None:
        """Save and upload the policy with its model card.

        Return the commit's URL in the main process, and None in other processes.
        """
        self._files.save_policy(Path(self.args.output_dir))
        return self._files.push(commit_message, **details)
