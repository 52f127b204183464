"""Names of models that tell apart what they were trained with."""

from pathlib import Path

from pipeline.inputs.model_digests import digest_of_model
from tests.helpers.models.model_hub import commit_of, model_hub
from tests.helpers.models.tiny import make_policy


def test_a_model_on_the_hub_is_its_commit_however_the_revision_is_named(tmp_path: Path):
    made = {f"org/policy@{revision}": tmp_path / revision for revision in ("main", "v1")}
    for folder in made.values():
        make_policy().config.save_pretrained(folder)
    with model_hub(made, tmp_path / "cache"):
        commits = {revision: commit_of(f"org/policy@{revision}") for revision in ("main", "v1")}
        assert digest_of_model("org/policy") == f"org/policy@{commits['main']}"
        assert digest_of_model("org/policy@v1") == f"org/policy@{commits['v1']}"
        assert digest_of_model(f"org/policy@{commits['v1']}") == f"org/policy@{commits['v1']}"
