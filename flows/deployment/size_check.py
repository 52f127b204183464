"""Check that the trainings fit the memory of a deployment's machines and its time limits.

The data are not read. This check assumes that every prompt has `PROMPT_TOKENS` tokens and every
response the maximum length. `flows/rlhf.py run --check` reads the data and uses the actual lengths.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from deployment.deploy_flow import DeploymentFiles
from deployment.deployment import Deployment
from deployment.step_settings import StepResources
from pipeline.cost.gpu_table import Gpu, find_gpu, read_gpus
from pipeline.cost.memory.ppo_memory import PPOSize, host_memory
from pipeline.cost.memory_table import (
    RANK,
    Training,
    TrainingSize,
    memory_of,
    recommended,
)
from pipeline.cost.run_time import TableSpeed, missing_speeds, ppo_seconds
from pipeline.cost.training_sizes import (
    Processes,
    adapter_parameters,
    ppo_size,
    reward_size,
    sft_size,
)
from pipeline.preflight.fetch_inputs import MODEL_JUDGES
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.storage.workspace import MODELS, REGISTRY, Workspace
from ppo_core.config.reward_names import read_rewards
from ppo_core.errors import ConfigError, ModelError, PPOError
from ppo_core.io.text_files import read_toml_file
from ppo_core.models.loading import count_parameters
from ppo_core.ppo.schedule import Schedule, make_schedule

PROMPT_TOKENS = 1024
"""Assumed number of tokens of each prompt, as in the table of presets in docs/own-data.md."""

DEFAULT_MINUTES = 5 * 24 * 60
"""Metaflow's default time limit of an attempt, in minutes."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """A training, and the resources and GPU type of the step that runs it."""

    step: str
    resources: StepResources
    gpu: Gpu
    training: Training

    @property
    def place(self) -> str:
        """Name of the step's table in the deployment file."""
        return f"steps.{self.step}"


def check_sizes(files: DeploymentFiles) -> list[str]:
    """Return lines of text that compare each training with its machine and time limit.

    If a model cannot be read here, return one line with the reason.

    Raises:
        ConfigError: a training needs more GPUs or memory than its machine has, or more time than
            its limit.
    """
    deployment = files.deployment
    lines: list[str] = []
    with TemporaryDirectory() as folder:
        try:
            settings = _read_with_models(files.settings, Path(folder))
        # The person who deploys the flows may have no access to the models.
        except PPOError as error:
            return [_not_compared(error)]
        try:
            planned = list(_planned(deployment, settings, lines))
        # A reward model, or a model in `rewards`, is a hub id that cannot be read here.
        except ModelError as error:
            return [_not_compared(error)]
    for one in planned:
        lines += _check_processes(one, settings)
        lines += _check_memory(one)
        if isinstance(one.training.size, PPOSize):
            lines += _check_main_memory(one, one.training.size)
            lines += _check_time(one, one.training.size, deployment, settings)
    return lines


def _not_compared(error: PPOError) -> str:
    return (
        f"sizes: not compared with the machines, because a model could not be read: {error} "
        "To compute the sizes, run `flows/rlhf.py --config settings FILE run --check` on a machine "
        "that can read the model."
    )


def _read_with_models(path: Path, folder: Path) -> Settings:
    """Download the models' configurations and tokenizers to `folder`, and return the settings.

    Raises:
        PPOError: a setting is wrong, or a model cannot be read here.
    """
    table, workspace = read_toml_file(path, ConfigError), Workspace(str(folder))
    if not table.get("policy"):
        raise ModelError("the settings name no policy.")
    for name in MODELS:
        table[name] = _fetch(name, str(table.get(name) or ""), workspace)
    table["rewards"] = [
        one.moved(_fetch("rewards", one.source, workspace))
        if one.kind in MODEL_JUDGES
        else one.spec
        for one in read_rewards(table.get("rewards") or [])
    ]
    return make_settings(table, {}, parameters=count_parameters(table["policy"]))


def _fetch(setting: str, place: str, workspace: Workspace) -> str:
    """Return the path or hub id of a model that a setting names, without its weights."""
    if place.startswith(REGISTRY):
        raise ModelError(
            f"{setting}={place!r} is a version of a registry, which this check does not read."
        )
    return workspace.fetch(place, weights=False)


def _planned(
    deployment: Deployment, settings: Settings, lines: list[str]
) -> Iterator[PlannedTraining]:
    """Yield the trainings that run on a known type of GPU and have a known size (see `_size_of`).

    Skip every other training; if it runs on GPUs, append the reason to `lines`.
    """
    trainings = {
        "load_policy": ("SFT", "sft", settings.sft.lora.r),
        "load_reward_model": (
            "reward model",
            "reward_model_training",
            settings.reward_model_training.lora.r,
        ),
        "train_policy": ("PPO", "ppo", settings.lora.r),
    }
    if not settings.sft_data:
        del trainings["load_policy"]
    if settings.reward_model and settings.judge and not settings.fresh_pairs.wanted:
        del trainings["load_reward_model"]
    for step, (name, section, rank) in trainings.items():
        resources = deployment.resources_of(step)
        if not resources.gpu:
            continue
        gpu = _gpu_of(resources, settings)
        if gpu is None:
            lines.append(
                f"sizes: {name} is not compared with steps.{step}, whose type of GPU is not known. "
                f"{_ask_for_gpu(resources, settings)}"
            )
            continue
        number = (settings.processes or resources.gpu) * settings.num_nodes
        processes = Processes(number=number, machines=settings.num_nodes, on_gpus=True)
        size = _size_of(name, settings, processes)
        if size is None:
            lines.append(
                f"sizes: {name} is not compared with steps.{step}, because it offloads or has "
                "DeepSpeed settings of its own."
            )
            continue
        adapter = size.adapter or adapter_parameters(settings, rank or RANK)
        training = Training(name=name, section=section, size=size, adapter=adapter)
        yield PlannedTraining(step=step, resources=resources, gpu=gpu, training=training)


def _size_of(name: str, settings: Settings, processes: Processes) -> TrainingSize | None:
    """Return the size of a training; None if it offloads or has its own DeepSpeed settings."""
    if name == "SFT":
        return sft_size(settings, longest=settings.sft.max_length, processes=processes)
    if name == "reward model":
        longest = settings.reward_model_training.max_length
        return reward_size(settings, longest=longest, processes=processes)
    schedule = _schedule(settings, processes.number)
    return ppo_size(settings, schedule, longest_prompt=PROMPT_TOKENS, processes=processes)


def _schedule(settings: Settings, processes: int) -> Schedule:
    """Return the schedule of PPO for a data set with one prompt.

    The number of prompts matters only if num_train_epochs determines the number of updates.
    """
    return make_schedule(settings.ppo, num_prompts=1, num_processes=processes)


def _gpu_of(resources: StepResources, settings: Settings) -> Gpu | None:
    """Return the GPU of a step, or None if the GPU is unknown.

    The step's `gpu_type` takes precedence over the GPU in the settings.
    """
    table = read_gpus(settings.hardware).values()
    if resources.gpu_type:
        return next((gpu for gpu in table if _label(gpu) == resources.gpu_type), None)
    return find_gpu(settings.hardware) if settings.hardware.gpu else None


def _label(gpu: Gpu) -> str:
    """Return the node label of a GPU: the name that CUDA reports, with hyphens for spaces."""
    return gpu.device.replace(" ", "-")


def _ask_for_gpu(resources: StepResources, settings: Settings) -> str:
    """Return what to do if the GPU of a step is not known, as sentences."""
    if not resources.gpu_type:
        return "Name it in the settings file: [hardware] gpu."
    known = ", ".join(_label(gpu) for gpu in read_gpus(settings.hardware).values() if gpu.device)
    return (
        f"gpu_type={resources.gpu_type!r} is none of the devices in flows/gpus.toml ({known}). "
        "Correct it if it is misspelled. Otherwise, describe the GPU in the settings file as "
        "[hardware.gpus.NAME], name it in [hardware] gpu, and compute the sizes with "
        "`flows/rlhf.py --config settings FILE run --check`."
    )


def _check_processes(planned: PlannedTraining, settings: Settings) -> list[str]:
    wanted, given = settings.processes or planned.resources.gpu, planned.resources.gpu
    if wanted > given:
        raise ConfigError(
            f"processes={wanted}, but {planned.place}.gpu={given}. Each process needs its own GPU, "
            f"so {planned.training.name} would fail at once. Set both to the same number."
        )
    if wanted < given:
        return [
            f"warning: {planned.place}.gpu={given} and processes={wanted}: the other GPUs are paid "
            "for and idle. Set both to the same number."
        ]
    return []


def _check_memory(planned: PlannedTraining) -> list[str]:
    training, gpu = planned.training, planned.gpu
    needed = memory_of(training.size).total
    needs = (
        f"{planned.place}: {training.name} needs about {needed / GIB:.1f} GiB per GPU, and "
        f"{gpu.name} has {gpu.memory / GIB:.1f}, of which {gpu.usable / GIB:.1f} are usable"
    )
    if needed <= gpu.usable:
        return [f"{needs}."]
    choice = recommended(training, gpu.usable, on_gpus=True)
    instead = (
        f"These settings fit:\n{choice.as_settings()}"
        if choice
        else "No precision or sharding fits: use gradient_checkpointing, smaller batches, or more "
        "or larger GPUs."
    )
    if needed > gpu.memory:
        raise ConfigError(f"{needs}: it would run out of GPU memory. {instead}")
    return [f"warning: {needs}. {instead}"]


def _check_main_memory(planned: PlannedTraining, size: PPOSize) -> list[str]:
    needed, given = host_memory(size) / GIB, planned.resources.memory_gib
    if needed > given:
        raise ConfigError(
            f"{planned.place}.memory_gib={given:g}, and PPO needs about {needed:.0f} GiB of main "
            "memory per machine, because its processes load all models there before they move them "
            f"to the GPUs. The step would be killed. Set memory_gib to at least {ceil(needed)}."
        )
    return []


def _check_time(
    planned: PlannedTraining, size: PPOSize, deployment: Deployment, settings: Settings
) -> list[str]:
    gpu, resources = planned.gpu, planned.resources
    if missing := missing_speeds(gpu, size.processes, size.machines):
        return [
            f"time: not compared, because [hardware.gpus.{gpu.name}] lacks {', '.join(missing)}."
        ]
    if settings.ppo.total_episodes is None and settings.ppo.max_steps == -1:
        return ["time: not compared: num_train_epochs is set, and the prompts are not read here."]
    hours = _hours(planned, size, settings)
    limit = (resources.timeout_minutes or DEFAULT_MINUTES) / 60
    setting = f"{planned.place}.timeout_minutes={resources.timeout_minutes}"
    enough = ceil(1.2 * hours * 60)
    if 0 < deployment.timeout_hours < limit:
        limit = deployment.timeout_hours
        setting, enough = f"timeout_hours={limit:g}", ceil(1.2 * hours)
    takes = (
        f"PPO takes roughly {hours:.1f} h on {size.processes} x {gpu.name}, with prompts of "
        f"{PROMPT_TOKENS:,} tokens and responses of full length"
    )
    if hours > limit:
        raise ConfigError(
            f"{setting} stops the step after {limit:.1f} h, and {takes}. Set it to at least "
            f"{enough}, or use faster GPUs, a larger local_rollout_forward_batch_size, or fewer "
            "episodes."
        )
    lines = [f"{planned.place}: {takes}; an attempt is stopped after {limit:.1f} h."]
    budget, used = deployment.alarms.gpu_hours, hours * size.processes
    if budget and used > budget:
        lines.append(
            f"warning: alarms.gpu_hours={budget:g}, and PPO alone takes about {used:.1f} GPU "
            "hours: each run would raise the alarm."
        )
    return lines


def _hours(planned: PlannedTraining, size: PPOSize, settings: Settings) -> float:
    speed = TableSpeed.of(planned.gpu, size)
    seconds = ppo_seconds(
        size,
        _schedule(settings, size.processes),
        speed,
        epochs=settings.ppo.num_ppo_epochs,
        mean_prompt=PROMPT_TOKENS,
        samples_here=not settings.ppo.use_vllm,
    )
    return seconds / 3600
