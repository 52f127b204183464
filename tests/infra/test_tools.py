"""The tools of AWS in an environment of their own: checkov, and the documented commands."""

import json
import os
import subprocess

import pytest

from tests.helpers.policies import FOLDER as TOOLS
from tests.helpers.stacks import FOLDER, UPLOADS, cloud, parameters

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

        def aws(*words: str) -> None:
            ran = subprocess.run(
                [TOOLS / "bin" / "aws", "cloudformation", *words],
                cwd=FOLDER,
                env={**os.environ, **made.variables},
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr

        def deploy() -> str:
            """Return the address of MLflow, an output of a nested stack.

            moto forgets the outputs of a stack that was made by a change set.
            """
            file = tmp_path / "parameters.json"
            file.write_text(json.dumps([f"{key}={value}" for key, value in values.items()]))
            packaged = str(tmp_path / "packaged.yaml")
            aws(
                *("package", "--template-file", "root.yaml", "--s3-bucket", UPLOADS),
                *("--output-template-file", packaged),
            )
            aws(
                *("deploy", "--template-file", packaged, "--stack-name", "rlhf"),
                *("--capabilities", "CAPABILITY_NAMED_IAM"),
                *("--parameter-overrides", f"file://{file}"),
            )
            stacks = made.client("cloudformation").describe_stacks()["Stacks"]
            (tracking,) = [one for one in stacks if one["StackName"].startswith("rlhf-Tracking-")]
            return next(
                each["OutputValue"] for each in tracking["Outputs"] if each["OutputKey"] == "Url"
            )

        assert deploy() == "https://mlflow.rlhf.example.com"
        values["Domain"] = "models.example.com"
        assert deploy() == "https://mlflow.models.example.com"
