"""Candidates, champions and judges whose contests a reader can foresee, on a real MLflow server."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus

from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.inputs.flow_run import FlowRun
from pipeline.promotion.register_and_decide import Candidate
from pipeline.registry.artifact import VersionContents, write_artifact
from pipeline.results.step_records import (
    Change,
    EvaluatedPolicy,
    FetchedChampion,
    PreparedModel,
    TrainedPolicy,
    ValidatedReward,
)
from pipeline.settings.decoding import Decoding
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.tracking.mlflow_client import connect
from ppo_core.io.folder_cache import digest_of_folder
from serving.manifest import MANIFEST_TAG
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.models.tiny import PAD, make_policy, make_tokenizer

FIT = ValidatedReward(
    fit=True, accepted_by_hand=False, reasons=[], bias=0.0, gain=1.0, report_file=""
)

JUDGE = """
from pathlib import Path

def judge(prompts, pairs):
    with (Path(__file__).parent / "asked").open("a") as file:
        file.write("x" * len(pairs))
    count = lambda text: text.split().count("w1")
    return [
        "tie" if count(a) == count(b) else "first" if count(a) > count(b) else "second"
        for a, b in pairs
    ]
"""
"""Likes w1, and counts the pairs that it is asked about."""

ALWAYS_FIRST = "def judge(prompts, pairs):\n    return ['first'] * len(pairs)\n"
"""Follows the position, so that nothing it says is conclusive."""


def write_policy(
    folder: Path, liking: float, *, stop: int | None = None, word: str = "w1", prefix: str = "w"
) -> str:
    """A policy that says `word` e^liking times as often as any other token.

    Its last hidden state is the same whatever it read, so that it has no other opinion.
    """
    model, tokenizer = make_policy("gpt2"), make_tokenizer(prefix=prefix)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()
        model.transformer.ln_f.bias[0] = 1
        model.transformer.wte.weight[:, 0] = 0
        # A filler in an answer is none of its words.
        model.transformer.wte.weight[PAD, 0] = -100
        model.transformer.wte.weight[tokenizer.convert_tokens_to_ids(word), 0] = liking
        if stop is not None:
            model.transformer.wte.weight[stop, 0] = liking
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class World:
    """Inputs on disk, policies that like w1 more and more, and those uploaded as models."""

    folder: Path
    settings: Settings
    policies: Mapping[str, str]
    uploaded: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Id of the logged model and digest of its manifest, by the policy's name."""

    def named(self, name: str, **changes: Any) -> Settings:
        return replace(self.settings, registered_model=name, **changes)

    def judged_pairs(self) -> int:
        """How many pairs the judge was asked about so far."""
        asked = self.folder / "asked"
        return asked.stat().st_size if asked.exists() else 0

    def evaluate(
        self,
        settings: Settings,
        policy: str,
        folder: Path,
        champion: FetchedChampion | None = None,
    ) -> EvaluatedPolicy:
        folder.mkdir(parents=True, exist_ok=True)
        return evaluate_policies(
            settings, self.policies["sft"], self.policies[policy], champion, folder
        )

    def candidate(
        self,
        settings: Settings,
        policy: str,
        run: FlowRun,
        evaluation: EvaluatedPolicy,
        validation: ValidatedReward = FIT,
    ) -> Candidate:
        return Candidate(
            settings=settings,
            run=run,
            sft=self.model("sft"),
            reward_model=self.model("sft"),
            trained=self.trained(policy),
            validation=validation,
            evaluation=evaluation,
        )

    def model(self, policy: str) -> PreparedModel:
        path = self.policies[policy]
        return PreparedModel(path=path, digest=digest_of_folder(Path(path)), metrics={})

    def trained(self, policy: str) -> TrainedPolicy:
        return TrainedPolicy(
            path=self.policies[policy],
            digest=digest_of_folder(Path(self.policies[policy])),
            objective={
                f"objective/{name}": Change(first=0.0, last=1.0) for name in ("kl", "scores")
            },
            warnings=[],
            episodes_per_second=1.0,
            peak_rss_bytes=2**20,
            tokens_sampled=1_000,
            tokens_trained=4_000,
            self_check={"backend": "fast", "policy_padded": 1e-7},
        )

    def upload(self, policy: str, decoding: Decoding | None = None) -> tuple[str, str]:
        """The policy as a logged model with a manifest, as the flow makes them."""
        if decoding is None and policy in self.uploaded:
            return self.uploaded[policy]
        client = connect()
        experiment = client.create_experiment(f"uploads {uuid4().hex}")
        model = client.create_logged_model(experiment, "policy")
        with tempfile.TemporaryDirectory() as folder:
            digest = write_artifact(
                Path(self.policies[policy]),
                Path(folder),
                VersionContents(
                    name="uploaded",
                    decoding=decoding or Decoding(response_length=6, temperature=0.7),
                    example="w2",
                    card="# Card",
                ),
                run_id=client.create_run(experiment).info.run_id,
                model_id=model.model_id,
            )
            client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        made = (model.model_id, digest)
        if decoding is None:
            self.uploaded[policy] = made
        return made

    def add_version(self, name: str, policy: str, decoding: Decoding | None = None) -> int:
        """A version of a registered model without any decision on it."""
        client, (model_id, digest) = connect(), self.upload(policy, decoding)
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        made = client.create_model_version(
            name, f"models:/{model_id}", model_id=model_id, tags={MANIFEST_TAG: digest}
        )
        return int(made.version)


def make_world(folder: Path) -> World:
    """Four policies; each beats those before it in nearly every pair."""
    # A forked process would wait for ever for the threads of its parent.
    torch.set_num_threads(1)
    table = tiny_table(folder)
    (folder / "judge.py").write_text(JUDGE)
    # Who says one word again and again repeats itself, and is far from SFT.
    # 16 prompts are few.
    table["promotion"] = {"max_repetition": 1.0, "max_kl": 1000.0, "alpha": 0.05}
    likings = {"sft": 0.0, "weak": 2.0, "good": 3.5, "best": 9.0}
    policies = {name: write_policy(folder / name, liking) for name, liking in likings.items()}
    table["policy"] = policies["sft"]
    return World(folder, make_settings(table, {}), policies)


@contextmanager
def judge_says(world: World, source: str) -> Iterator[None]:
    """Another judge while the context lasts."""
    path = world.folder / "judge.py"
    before = path.read_text()
    path.write_text(source)
    try:
        yield
    finally:
        path.write_text(before)


def artifact_root(client: MlflowClient, name: str, version: int) -> Path:
    """Where the files of a version lie in the store of the server, which is a folder."""
    model_id = client.get_model_version(name, str(version)).source.removeprefix("models:/")
    place = client.get_logged_model(model_id).artifact_location
    return Path(place.removeprefix("file://"))
