"""Sizes of published Llama models, and the table of their memory: `python -m` this module."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.cost.gpu_table import read_gpus
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import ModelSize
from pipeline.cost.memory.supervised_memory import SupervisedSize
from pipeline.cost.memory_table import Training, render_table
from pipeline.settings.hardware_config import HardwareConfig

GPU, NUMBER = "h100-80gb", 8
"""The GPUs of the tables."""

RANK = 16
"""Rank of the adapters."""


def llama(*, vocabulary: int, width: int, mlp: int, layers: int, heads: int, groups: int):
    """The size of a Llama with a head of its own, from the formula of its parameters."""
    keys = groups * (width // heads)
    layer = 2 * width * width + 2 * width * keys + 3 * width * mlp + 2 * width
    outside = 2 * vocabulary * width + width
    return ModelSize(
        parameters=layers * layer + outside,
        outside_layers=outside,
        layers=layers,
        width=width,
        mlp_width=mlp,
        is_gated=True,
        heads=heads,
        key_width=keys,
        vocabulary=vocabulary,
    )


LLAMA = {
    # TinyLlama-1.1B: a layer 2 x 2048^2 + 2 x 2048 x 256 + 3 x 2048 x 5632 + 2 x 2048 = 44,044,288;
    # 22 layers 968,974,336; outside 2 x 32000 x 2048 + 2048 = 131,074,048.
    "1B": (
        llama(vocabulary=32_000, width=2_048, mlp=5_632, layers=22, heads=32, groups=4),
        1_100_048_384,
    ),
    # Llama-3.1-8B: a layer 2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336 + 2 x 4096 =
    # 218,112,000; 32 layers 6,979,584,000; outside 2 x 128256 x 4096 + 4096 = 1,050,677,248.
    "8B": (
        llama(vocabulary=128_256, width=4_096, mlp=14_336, layers=32, heads=32, groups=8),
        8_030_261_248,
    ),
    # Llama-3.1-70B: a layer 2 x 8192^2 + 2 x 8192 x 1024 + 3 x 8192 x 28672 + 2 x 8192 =
    # 855,654,400; 80 layers 68,452,352,000; outside 2 x 128256 x 8192 + 8192 = 2,101,354,496.
    "70B": (
        llama(vocabulary=128_256, width=8_192, mlp=28_672, layers=80, heads=64, groups=8),
        70_553_706_496,
    ),
}


def adapter(model: ModelSize) -> int:
    """Parameters of adapters on all linear layers: rank x (inputs + outputs)."""
    width, keys, mlp = model.width, model.key_width, model.mlp_width
    return RANK * model.layers * (2 * 2 * width + 2 * (width + keys) + 3 * (width + mlp))


def trainings(model: ModelSize) -> Sequence[Training]:
    """SFT, reward model and PPO with texts of up to 1,536 tokens, 2 in a pass of a process."""
    shared = {"sharding": "fsdp2", "processes": NUMBER, "autocast": True, "recomputes": True}
    head = model.width * model.vocabulary - model.width
    scorer = replace(
        model, parameters=model.parameters - head, outside_layers=model.outside_layers - head
    )
    supervised = {"tokens": 2 * 1_536, **shared}
    sizes = {
        "SFT": ("sft", SupervisedSize(model=model, writes=True, **supervised)),
        "reward model": (
            "reward_model_training",
            SupervisedSize(model=scorer, writes=False, **(supervised | {"tokens": 4 * 1_536})),
        ),
        "PPO": (
            "ppo",
            PPOSize(
                policy=model,
                critic=None,
                rewards=(scorer,),
                prompt_tokens=1_024,
                response_tokens=512,
                sampled_rows=8,
                trained_rows=2,
                trained_tokens=2 * 1_536,
                **shared,
            ),
        ),
    }
    return [
        Training(name=name, section=section, size=size, adapter=adapter(model))
        for name, (section, size) in sizes.items()
    ]


def table(name: str) -> str:
    """The table of `--check` for a model of LLAMA."""
    usable = read_gpus(HardwareConfig())[GPU].usable
    title = f"{name}, memory per GPU of {NUMBER} x {GPU} in GiB, {usable / 2**30:.1f} usable"
    return render_table(trainings(LLAMA[name][0]), usable, on_gpus=True, title=title)


if __name__ == "__main__":
    print("\n\n".join(map(table, LLAMA)))
