"""Save the trained policy with its model card, and upload it to the hub."""

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ppo_core.checkpointing.folders import POLICIES
from ppo_core.data.model_files import ADAPTER, replaced_together, save_tokenizer
from ppo_core.distributed.gather_weights import gather_weights, save_plain
from ppo_core.errors import TrainingError
from ppo_core.models.files.adapter_weights import save_adapter
from ppo_core.models.files.critic_files import write_critic
from ppo_core.models.files.rollout_files import write_rollouts
from ppo_core.ppo.run_state import RunContext
from ppo_core.training.model_card import push_folder, write_model_card


class PolicyExporter(RunContext):
    """Writes the policy of a run in the main process; all processes must call the methods."""

    def save_policy(self, folder: Path) -> None:
        """Save policy and tokenizer completely or not at all.

        With `ema_decay`, save the averaged weights.

        Raises:
            TrainingError: a file cannot be written, for example because the disk is full.
        """
        averaged = self.average.swapped_in() if self.average else nullcontext()
        with averaged:
            self._write_policy(folder)

    def save_earlier(self, due: Collection[int]) -> None:
        """Save the policy in its own folder in `POLICIES` if the number of updates is in `due`.

        Raises:
            TrainingError: see `save_policy`.
        """
        if self.run.updates in due:
            self.save_policy(self._earlier(self.run.updates))

    def require_earlier(self, due: Collection[int]) -> None:
        """Raise if an earlier policy is missing that the resumed run would not save again.

        Raises:
            TrainingError: the folder of a policy is missing; raised in all processes.
        """
        done = [update for update in due if update <= self.run.updates]
        missing = [update for update in done if not self._earlier(update).is_dir()]
        if self.engine.any(self.engine.is_main and bool(missing)):
            raise TrainingError(
                f"save_policies={self.config.save_policies} saves the policies after the updates "
                f"{', '.join(map(str, due))}. The run resumes after update {self.run.updates}, and "
                f"in '{self._earlier(0).parent}' some policies up to this update are missing. Copy "
                "the missing policies there, resume with save_policies=0, or start a new run."
            )

    def _earlier(self, update: int) -> Path:
        return Path(self.config.output_dir) / POLICIES / str(update)

    def _write_policy(self, folder: Path) -> None:
        adapted, model = self.models.adapted, self.models.policy.model
        weights = gather_weights(self.engine, model, adapted)
        if not self.engine.is_main:
            return
        with replaced_together(folder) as unfinished:
            if adapted is not None:
                save_adapter(adapted, unfinished / ADAPTER, weights=weights)
            save_plain(model, adapted, unfinished, weights, self.models.saved_dtype)
            save_tokenizer(self.tokenizer, unfinished)

    def save_critic(self, folder: Path) -> None:
        """Save the critic and the kept rollouts completely or not at all.

        See `write_critic` and `write_rollouts`.

        Raises:
            TrainingError: see `save_policy`.
        """
        critic = self.models.critic
        assert critic is not None  # checked by `require_whole_critic`
        weights = self.engine.full_state_dict(critic.model)
        head = self.engine.full_state_dict(critic.head)
        if weights is None or head is None:
            return
        with replaced_together(folder) as unfinished:
            write_critic(critic, weights, head, unfinished)
            write_rollouts(self.run.first_rollouts or [], unfinished)

    def write_card(self, *, model_name: str | None = None, **details: Any) -> None:
        """Write README.md with the settings and the metrics of the last logged update."""
        history = self.reporter.state.log_history
        # The last entry may be an evaluation after the update.
        last = max((one["step"] for one in history if "objective/kl" in one), default=None)
        metrics = {
            name: value for one in history if one["step"] == last for name, value in one.items()
        }
        if self.engine.is_main:
            write_model_card(
                Path(self.config.output_dir),
                config=self.config,
                base_model=getattr(self.models.policy.model.config, "_name_or_path", ""),
                metrics=metrics,
                model_name=model_name,
                **details,
            )

    def push(self, commit_message: str, **details: Any) -> str | None:
        """Upload `output_dir`, see `push_folder`; return the commit's URL in the main process."""
        self.write_card(**details)
        if not self.engine.is_main:
            return None
        folder = Path(self.config.output_dir)
        return push_folder(
            folder,
            repo_id=self.config.hub_model_id or folder.resolve().name,
            token=self.config.hub_token,
            private=self.config.hub_private_repo,
            commit_message=commit_message,
        )
