"""The tools of AWS in an environment of their own: checkov, and the documented commands."""

import json
import os
import re
import shlex
import subprocess

import pytest

from tests.helpers.aws.policies import FOLDER as TOOLS
from tests.helpers.aws.stacks import FOLDER, UPLOADS, cloud, parameters
from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TOOLS / "bin" / "checkov").exists(),
        reason="checkov and awscli are not installed: `make deployed` installs them.",
    ),
]


def test_checkov_finds_nothing():
    ran = subprocess.run(
        [
            *(TOOLS / "bin" / "checkov", "--directory", FOLDER, "--framework", "cloudformation"),
            *("--output", "json", "--compact", "--skip-download"),
        ],
        capture_output=True,
        text=True,
    )
    summary = json.loads(ran.stdout)["summary"]
    assert ran.returncode == 0, ran.stdout
    assert summary["failed"] == summary["parsing_errors"] == 0
    assert summary["passed"] > 200
    assert summary["skipped"] == 4


def test_the_documented_commands_create_and_update_the_stack(tmp_path):
    with cloud() as made:
        made.client("s3").create_bucket(Bucket=UPLOADS)
        values = parameters() | {"Certificate": made.certificate("rlhf.example.com")}

        def deploy() -> str:
            """Run the commands of the README; return the address of MLflow, of a nested stack.

            moto forgets the outputs of a stack that was made by a change set.
            """
            file = tmp_path / "parameters.json"
            file.write_text(json.dumps([f"{key}={value}" for key, value in values.items()]))
            joined = re.sub(r"\\\n\s*", " ", (FOLDER / "README.md").read_text())
            documented = re.findall(r"^aws (cloudformation (?:package|deploy) .+)$", joined, re.M)
            assert len(documented) == 2
            for line in documented:
                for word, own in {
                    "templates-$ACCOUNT-$AWS_REGION": UPLOADS,
                    "file://infra/aws/parameters.json": f"file://{file}",
                    "packaged.yaml": str(tmp_path / "packaged.yaml"),
                }.items():
                    line = line.replace(word, own)
                ran = subprocess.run(
                    [TOOLS / "bin" / "aws", *shlex.split(line)],
                    cwd=ROOT,
                    env={**os.environ, **made.variables},
                    capture_output=True,
                    text=True,
                )
                assert ran.returncode == 0, ran.stdout + ran.stderr
            stacks = made.client("cloudformation").describe_stacks()["Stacks"]
            (tracking,) = [one for one in stacks if one["StackName"].startswith("rlhf-Tracking-")]
            return next(
                each["OutputValue"] for each in tracking["Outputs"] if each["OutputKey"] == "Url"
            )

        assert deploy() == "https://mlflow.rlhf.example.com"
        values["Domain"] = "models.example.com"
        assert deploy() == "https://mlflow.models.example.com"
