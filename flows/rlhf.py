"""RLHF from preferences to a registered policy: `python flows/rlhf.py run`.

Without arguments, the flow runs the built-in task. To use your own data and models:

    python flows/rlhf.py run --policy gpt2 --preferences pairs.jsonl --prompts train.jsonl

The last prompts are then held out, and a second reward model judges the answers to them. Better
evidence comes from `--eval-prompts test.jsonl` with references, and from another judge, such as
`--judge python:judge.py:judge`.

Every other setting comes from a file (`python flows/rlhf.py --config settings FILE.toml run`) or
from the command line (`run --set ppo.learning_rate=3e-6 --set evaluation.num_examples=500`).
"""

import sys
from typing import Any

from metaflow import Config, FlowMutator, FlowSpec, Parameter, card, current, parallel, retry, step

from flow_parts import (
    alarms_of,
    deployment_of_file,
    explained_errors,
    more_files,
    parse_deployment,
    parse_toml,
    run_command,
    run_id,
)
from metaflow_glue.command_line import check_instead_of_run, refuse_scheduler, send_to_scheduler
from pipeline import stages
from ppo_core.errors import ConfigError
from ppo_core.io.atomic_files import explained_full_disk
from retraining import alarms, lease_of_run
from step_wrapper import RECORDS, is_last_attempt, phase

STAGES = (
    "start",
    "sft_and_reward_models",
    "validation",
    "ppo_training",
    "evaluation",
    "registration",
    "cards",
)
IMPORTED = [
    *(f"pipeline.stages.{stage}" for stage in STAGES),
    "step_wrapper",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
]
"""Modules that the fork server imports. Together with the modules that they import, these are
nearly all modules that the steps and their cards need."""

# The code that writes the card limits the rate, so the interval is 0. `LiveCard` uses this id.
training_card = card(type="blank", id="training", refresh_interval=0)


class machines_of_settings(FlowMutator):  # noqa: N801
    """Use the steps of `SeveralMachines` if num_nodes is above 1 in the settings file."""

    def pre_mutate(self, mutable_flow: Any) -> None:
        """Replace the steps before Metaflow reads the graph."""
        nodes = (dict(mutable_flow.configs)["settings"] or {}).get("num_nodes", 1)
        # The first step refuses a num_nodes of another type.
        nodes = nodes if isinstance(nodes, int) else 1
        with explained_errors():
            refuse_scheduler(sys.argv, nodes)
        # Metaflow has no method that replaces a step.
        if nodes > 1:
            for name in vars(SeveralMachines):
                # Use getattr, because vars() has the step's decorator instead of the step.
                if hasattr(member := getattr(SeveralMachines, name), "is_step"):
                    setattr(mutable_flow._flow_cls, name, member)


@deployment_of_file()
@machines_of_settings()
@more_files()
class RLHF(FlowSpec):
    """Train a policy on human preferences, judge its answers, and register the policy."""

    file_settings = Config(
        "settings",
        default_value="",
        parser=parse_toml,
        plain=True,
        help="TOML file with settings; flows/presets has examples.",
    )
    file_deployment = Config(
        "deployment",
        default_value="",
        parser=parse_deployment,
        plain=True,
        help="TOML file of a deployment, which flows/deploy.py gives.",
    )
    policy = Parameter("policy", type=str, help="Language model to improve: folder or hub id.")
    reward_model = Parameter(
        "reward-model", type=str, help="Reward model with one label; by default one is trained."
    )
    preferences = Parameter(
        "preferences", type=str, help="Rows with chosen, rejected and optionally prompt."
    )
    prompts = Parameter("prompts", type=str, help="Rows with prompt, for PPO.")
    eval_prompts = Parameter("eval-prompts", type=str, help="Rows with prompt and maybe reference.")
    judge = Parameter(
        "judge", type=str, help="openai:MODEL, python:FILE:FUNCTION, ...; see docs/own-data.md."
    )
    accept_reward_model = Parameter(
        "accept-reward-model",
        # Without the type, a scheduled run would get the text "true".
        type=bool,
        is_flag=True,
        help="Train even if the gate refuses the reward model.",
    )
    processes = Parameter("processes", type=int, help="Processes of each training on one machine.")
    total_episodes = Parameter("total-episodes", type=int, help="Total responses of PPO.")
    seed = Parameter("seed", type=int, help="Seed of all random numbers.")
    registered_model = Parameter("registered-model", type=str, help="Model name in MLflow.")
    output_dir = Parameter("output-dir", type=str, help="Folder for the cache and the runs.")
    check = Parameter(
        "check",
        type=bool,
        is_flag=True,
        callback=check_instead_of_run,
        help="Check all inputs, print the sizes of the run, and end.",
    )
    lease = Parameter(
        "lease", type=str, default="", help="Set by the flow Retrain: owner of the lease to use."
    )
    overrides = Parameter(
        "set",
        type=str,
        multiple=True,
        show_default=False,
        callback=send_to_scheduler,
        help="Any other setting: section.name=value, such as ppo.kl_coef=0.1; may be repeated.",
    )
    summary_json = Parameter("summary-json", type=str, help="File to write the summary to.")

    @phase
    @step
    def start(self) -> None:
        """Read the settings, check every input, and find the champion to beat."""
        self._begin()
        self.next(self.load_policy)

    @retry(times=3, minutes_between_retries=0)
    @training_card
    @phase
    @step
    def load_policy(self) -> None:
        """Load the policy, or fine-tune it first."""
        self.sft, self.fresh = stages.sft_and_reward_models.load_policy(self.settings, self.tracked)
        self.next(self.load_reward_model)

    @retry(times=3, minutes_between_retries=0)
    @training_card
    @phase
    @step
    def load_reward_model(self) -> None:
        """Load or train the reward model, and the judge if none is named; label pairs if asked."""
        self.rewarder, self.judge_model, self.fresh = (
            stages.sft_and_reward_models.load_reward_models(
                self.settings, self.sft, self.tracked, fresh=self.fresh
            )
        )
        self.next(self.validate_reward_model)

    # The interval is 0, so that the card of a refused reward model can be written at once.
    @card(type="blank", refresh_interval=0)
    @phase
    @step
    def validate_reward_model(self) -> None:
        """Measure the reward model on held-out preferences; end the run if it is refused."""
        self._validate()
        self.next(self.train_policy)

    @retry(times=3, minutes_between_retries=0)
    @training_card
    @phase
    @step
    def train_policy(self) -> None:
        """Train the policy with PPO; resume from the last checkpoint if there is one."""
        self.trained = stages.ppo_training.train_policy(
            self.settings,
            self.sft,
            self.rewarder,
            self.validation,
            self.tracked,
            fresh=self.fresh,
        )
        self.next(self.evaluate_win_rate)

    @retry(times=3, minutes_between_retries=0)
    @card(type="blank")
    @phase
    @step
    def evaluate_win_rate(self) -> None:
        """Judge the policy's answers to unseen prompts against references, SFT and the champion."""
        self.trained, self.evaluation = stages.evaluation.evaluate_win_rate(
            self.settings,
            self.sft,
            self.trained,
            self.champion,
            self.validation.judge,
            self.tracked,
            self.rewarder,
        )
        current.card.extend(
            stages.cards.evaluation_card(self.evaluation, self.trained.warnings, self.tracked)
        )
        self.next(self.register)

    @retry(times=3, minutes_between_retries=0)
    @card(type="blank")
    @phase
    @step
    def register(self) -> None:
        """Register the policy in MLflow, and promote it to champion or refuse it."""
        candidate = stages.registration.Candidate(
            settings=self.settings,
            run=self.tracked,
            sft=self.sft,
            reward_model=self.rewarder,
            fresh=self.fresh,
            trained=self.trained,
            validation=self.validation,
            evaluation=self.evaluation,
        )
        self.registered = stages.registration.register_policy(candidate)
        current.card.extend(
            stages.cards.promotion_card(
                self.registered, self.validation, self.settings.promotion, self.tracked
            )
        )
        self.next(self.end)

    @phase
    @step
    def end(self) -> None:
        """Write and print the summary."""
        self.summary = stages.summary.summarize(
            self.settings,
            self.validation,
            self.trained,
            self.registered,
            self.tracked,
            self.seconds,
            fresh=self.fresh,
        )
        told = alarms_of(self)
        alarms.alarm_refused_policies(told.topic, self.settings, run_id())
        alarms.alarm_budget(told.topic, told.gpu_hours, self.settings, self.tracked)

    def _begin(self) -> None:
        self.records = RECORDS
        if self.check:
            raise ConfigError(
                "check is a flag of `python flows/rlhf.py run` on this machine. A scheduled run "
                "would start all steps, so leave check out."
            )
        # Store the settings first: an error releases the lease only if the settings are stored.
        self.settings = given = self._given_settings()
        if self.lease:
            lease_of_run.lease_of(given, self.lease).renew(run_id())
        settings = stages.start.prepare_inputs(given, current.run_id)
        self.champion = stages.start.find_champion(settings)
        has_champion = self.champion is not None
        sizes = stages.check.describe_sizes(settings, has_champion=has_champion)
        print(sizes, flush=True)
        self.tracked = stages.start.start_run(
            given,
            settings,
            current.flow_name,
            current.run_id,
            self._tracked_steps(),
            self.champion,
        )
        with stages.start.ended_if_it_fails(self.tracked):
            self.settings = stages.start.share_inputs(settings, self.tracked)

    def _validate(self) -> None:
        self.validation = stages.validation.validate_reward_model(
            self.settings, self.sft, self.rewarder, self.judge_model, self.tracked, self.fresh
        )
        current.card.extend(stages.cards.reward_model_card(self.validation, self.tracked))
        if self.validation.refused:
            if is_last_attempt(self.validate_reward_model):
                topic = alarms_of(self).topic
                alarms.alarm_refused_reward_model(topic, self.settings, run_id(), self.validation)
            stages.cards.write_card_now(current.card)
            stages.validation.stop_run(self.validation, self.tracked)

    def _tracked_steps(self) -> list[str]:
        """Return the steps that have an MLflow run: all except the start, join and end steps."""
        graph = self._graph
        return [
            name for name in graph.sorted_nodes if graph[name].type not in ("start", "join", "end")
        ]

    def check_only(self) -> None:
        """Check the inputs as the first step does, and print the sizes; start no run."""
        with explained_errors(), explained_full_disk():
            for text in stages.check.check_run(self._given_settings()):
                print(text, flush=True)
        print(
            "All checks passed. Nothing was trained or registered; leave --check out to start. "
            "The reward model is validated after its training."
        )

    def _given_settings(self) -> Any:
        """Return the settings from the file and the command line.

        Raises:
            ConfigError: see `read_settings`.
        """
        return stages.given_settings.read_settings(
            self.file_settings, self._command_line(), self.overrides or ()
        )

    def _command_line(self) -> dict[str, Any]:
        """Return setting name -> value on the command line; None for a parameter not given."""
        return {
            "policy": self.policy,
            "reward_model": self.reward_model,
            "preferences": self.preferences,
            "prompts": self.prompts,
            "eval_prompts": self.eval_prompts,
            "judge": self.judge,
            # A flag that was not given is False. This value must not override the settings file.
            "accept_reward_model": self.accept_reward_model or None,
            "processes": self.processes,
            "total_episodes": self.total_episodes,
            "seed": self.seed,
            "registered_model": self.registered_model,
            "output_dir": self.output_dir,
            "summary_json": self.summary_json,
        }


class SeveralMachines:
    """The steps of the flow that differ if `num_nodes` machines share each training.

    Metaflow's `@parallel` starts each training on all machines, and a join step keeps the result of
    the first machine. Metaflow reads the graph from the source code of the steps, so each step must
    be written out.
    """

    @phase
    @step
    def start(self: Any) -> None:
        """Read the settings, check every input, and find the champion to beat."""
        self._begin()
        self.next(self.load_policy, num_parallel=self.settings.num_nodes)

    @retry(times=3, minutes_between_retries=0)
    @training_card
    @phase
    @parallel
    @step
    def load_policy(self: Any) -> None:
        """Load the policy or fine-tune it; label pairs of its samples if the settings say so."""
        here, models = machines_of_step(), stages.sft_and_reward_models
        load = models.load_policy_as_worker if here.index else models.load_policy
        self.own_result = load(self.settings, self.tracked, here)
        self.next(self.join_policy)

    @phase
    @step
    def join_policy(self: Any, inputs: Any) -> None:
        """Continue with the policy of the first machine."""
        self.sft, self.fresh = result_of_first_machine(self, inputs)
        self.next(self.share_policy)

    @phase
    @step
    def share_policy(self: Any) -> None:
        """Start the next step on all machines, which a join step cannot do in Metaflow."""
        self.next(self.load_reward_model, num_parallel=self.settings.num_nodes)

    @retry(times=3, minutes_between_retries=0)
    @training_card
    @phase
    @parallel
    @step
    def load_reward_model(self: Any) -> None:
        """Load the reward model, or train it on preferences; train a judge if none is named."""
        here, models = machines_of_step(), stages.sft_and_reward_models
        load = models.load_reward_models_as_worker if here.index else models.load_reward_models
        self.own_result = load(self.settings, self.sft, self.tracked, here, fresh=self.fresh)
        self.next(self.join_reward_model)

    @phase
    @step
    def join_reward_model(self: Any, inputs: Any) -> None:
        """Continue with the models of the first machine."""
        self.rewarder, self.judge_model, self.fresh = result_of_first_machine(self, inputs)
        self.next(self.validate_reward_model)

    # The interval is 0, so that the card of a refused reward model can be written at once.
    @card(type="blank", refresh_interval=0)
    @phase
    @step
    def validate_reward_model(self: Any) -> None:
        """Measure the reward model on held-out preferences; end the run if it is refused."""
        self._validate()
        self.next(self.train_policy, num_parallel=self.settings.num_nodes)

    @retry(times=3, minutes_between_retries=0)
    @training_card
    @phase
    @parallel
    @step
    def train_policy(self: Any) -> None:
        """Train the policy with PPO; resume from the last checkpoint if there is one."""
        here, training = machines_of_step(), stages.ppo_training
        train = training.train_policy_as_worker if here.index else training.train_policy
        self.own_result = train(
            self.settings, self.sft, self.rewarder, self.validation, self.tracked, here
        )
        self.next(self.join_trained)

    @phase
    @step
    def join_trained(self: Any, inputs: Any) -> None:
        """Continue with the policy that the first machine trained."""
        self.trained = result_of_first_machine(self, inputs)
        self.next(self.evaluate_win_rate)


def machines_of_step() -> Any:
    """Return the machines of this step, with an attempt id that is equal on all machines."""
    attempt = f"{current.run_id}.{current.retry_count}"
    return stages.ppo_training.this_machine(current.parallel, attempt)


def result_of_first_machine(flow: Any, inputs: Any) -> Any:
    """Return the result of the first machine, and keep the artifacts that all machines share."""
    (first,) = [each for each in inputs if each.own_result]
    flow.seconds = first.seconds
    flow.merge_artifacts(inputs, exclude=["own_result", "seconds"])
    return first.own_result


if __name__ == "__main__":
    run_command(RLHF, is_brief=True, imported=IMPORTED)
