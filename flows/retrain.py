"""Start the flow RLHF if its inputs changed and no other run is training.

    python flows/retrain.py --config settings FILE.toml run

A schedule or an event starts this flow on a small machine. The flow RLHF, which needs GPUs, starts
only if an input has changed. `python flows/deploy.py` deploys both flows.
"""

from metaflow import Config, FlowSpec, Parameter, step

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


@deployment_of_file(is_scheduled=True)
@more_files()
class Retrain(FlowSpec):
    """Start the flow RLHF if its inputs changed and no other run is training."""

    file_settings = Config(
        "settings", default_value="", parser=parse_toml, plain=True, help="TOML file with settings."
    )
    file_deployment = Config(
        "deployment",
        default_value="",
        parser=parse_deployment,
        plain=True,
        help="TOML file of a deployment, which flows/deploy.py gives.",
    )
    take_over = Parameter(
        "take-over",
        # Without the type, a scheduled run would get the text "true".
        type=bool,
        is_flag=True,
        help="Take the lease from the run that holds it; that run ends without a version.",
    )

    @step
    def start(self) -> None:
        """Withdraw the champion if users prefer the previous one; fetch and compare the inputs."""
        with explained_errors():
            from retraining.retrain import watch_feedback
            from retraining.retraining_trigger import find_new_inputs

            watch_feedback(self.file_settings, run_id(), alarms_of(self).topic)
            self.found = find_new_inputs(self.file_settings, run_id())
        self.next(self.end)

    @step
    def end(self) -> None:
        """If an input is new, take the lease (the right to train) and start the flow RLHF."""
        with explained_errors():
            from retraining.retrain import retrain

            self.outcome = retrain(
                self.found, self.file_settings, run_id(), take_over=self.take_over
            )


if __name__ == "__main__":
    run_command(Retrain)
