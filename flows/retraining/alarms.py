"""Send alarms about a run to an Amazon SNS topic, but only if a person has to act."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppo_core.errors import ModelError
from ppo_core.errors.redaction import mask_secrets

if TYPE_CHECKING:
    from pipeline.inputs.flow_run import FlowRun
    from pipeline.results.step_records import ValidatedReward
    from pipeline.settings.settings import Settings

MAX_SUBJECT_CHARACTERS = 99
"""Maximum length of the subject of an SNS message."""

REFUSED_IN_A_ROW = 2
"""Number of consecutively refused policies after which an alarm is sent. Each further refused
policy causes another alarm."""


def alarm_refused_reward_model(
    topic: str, settings: "Settings", run: str, validation: "ValidatedReward"
) -> None:
    """Send an alarm that the run ended because its reward model was refused."""
    subject = f"{settings.registered_model}: the reward model was refused"
    send_alarm(topic, subject, [f"Run {run} ended before PPO.", *validation.reasons])


def alarm_refused_policies(topic: str, settings: "Settings", run: str) -> None:
    """Send an alarm if the last `REFUSED_IN_A_ROW` decisions all refused their policies."""
    if not topic:
        return
    # Imported here, because `change_champion` imports MLflow.
    from pipeline.registry.change_champion import read_champions

    try:
        decisions = read_champions(settings.registered_model).decisions
    except ModelError as error:
        # The run has registered its version, so it must not fail if MLflow does not answer.
        print(
            f"Warning: Could not check whether an alarm is due: {error}",
            file=sys.stderr,
            flush=True,
        )
        return
    last = decisions[-REFUSED_IN_A_ROW:]
    if len(last) < REFUSED_IN_A_ROW or any(each.action != "refused" for each in last):
        return
    subject = f"{settings.registered_model}: {len(last)} policies in a row were refused"
    said = [f"Version {each.version}, {each.by}: {' '.join(each.reasons)}" for each in last]
    send_alarm(topic, subject, [f"The last refused policy is from run {run}.", *said])


def alarm_budget(topic: str, budget: float, settings: "Settings", run: "FlowRun") -> None:
    """Send an alarm if a run used more GPU hours than its budget; a budget of 0 means no limit."""
    if not (topic and budget):
        return
    from pipeline.cost.usage import gpu_hours

    if (hours := gpu_hours(run)) > budget:
        name = settings.registered_model
        subject = f"{name}: {hours:.1f} GPU hours, budget {budget:g}"
        send_alarm(topic, subject, [f"Run {run.id} used more GPU hours than its budget."])


def send_alarm(topic: str, subject: str, sentences: Sequence[str]) -> None:
    """Send a message to a topic; if the topic cannot be reached, only print the message.

    Args:
        topic: ARN of the topic; empty for a run without alarms.
        subject: what happened, in one line.
        sentences: the text, one sentence per line.
    """
    if not topic:
        return
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    subject, text = mask_secrets(subject), mask_secrets("\n".join(sentences))
    region = topic.split(":")[3]
    try:
        boto3.client("sns", region_name=region).publish(
            TopicArn=topic, Subject=_as_subject(subject), Message=f"{subject}\n{text}"
        )
    except (BotoCoreError, ClientError) as error:
        # The run has already ended with a result, so a lost message must not make the run fail.
        print(
            f"Warning: The alarm was not sent: {error}\n{subject}\n{text}",
            file=sys.stderr,
            flush=True,
        )


def _as_subject(text: str) -> str:
    """Convert a text to a subject that SNS accepts: one short line of printable ASCII."""
    plain = "".join(character if " " <= character <= "~" else "?" for character in text)
    return plain[:MAX_SUBJECT_CHARACTERS]
