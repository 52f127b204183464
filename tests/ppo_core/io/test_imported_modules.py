"""The lists of modules that decide what the trainings produce, and their digests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_core.io.imported_modules import imported_modules
from tests.helpers.inputs.pipeline_inputs import write_ppo_inputs
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy
from tests.helpers.paths import ROOT
from tests.helpers.slow_cases import slow

SUPERVISED, PPO = "ppo_core.supervised.training", "ppo_core.__main__"

TRAIN_BOTH = """
import sys
from peft import LoraConfig
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model, train_sft

base, folder = sys.argv[1:]
config = SupervisedConfig(max_length=64)
examples = [{"prompt": "w0", "completion": "w1"}]
pairs = [{"prompt": "w0", "chosen": "w1", "rejected": "w2"}]
train_sft(base, examples, config, folder + "/sft", peft_config=LoraConfig(r=2))
train_reward_model(base, pairs, config, folder + "/reward")
print("loaded", *(name for name in sys.modules if name.partition(".")[0] == "ppo_core"))
"""

TRAIN_PPO = """
import sys
from ppo_core.__main__ import main
assert main(sys.argv[1:]) == 0
print("loaded", *(name for name in sys.modules if name.partition(".")[0] == "ppo_core"))
"""

CHANGE_EACH = """
import sys
from pathlib import Path
import ppo_core
from ppo_core.io.folder_cache import digest_of_code
from ppo_core.io.imported_modules import imported_modules

names = imported_modules(sys.argv[1])
before = digest_of_code(*names)
for path in Path(ppo_core.__file__).parent.rglob("*.py"):
    source = path.read_bytes()
    path.write_bytes(source + b"#")
    if digest_of_code(*names) != before:
        parts = path.relative_to(Path(ppo_core.__file__).parent.parent).with_suffix("").parts
        print(".".join(parts).removesuffix(".__init__"))
    path.write_bytes(source)
print("torch" in sys.modules)
"""


def printed_by(code: str, *arguments: object, source: Path = ROOT) -> list[str]:
    """Words that a script prints, with the ppo_core below `source`."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{source}:{ROOT / 'flows'}"},
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.split()


@pytest.mark.slow
def test_the_list_has_every_module_that_training_both_models_loads(tmp_path: Path):
    make_policy().save_pretrained(tmp_path / "base")
    make_chat_tokenizer().save_pretrained(tmp_path / "base")
    words = printed_by(TRAIN_BOTH, tmp_path / "base", tmp_path)
    loaded = words[words.index("loaded") + 1 :]
    assert {"ppo_core.supervised.lora", "ppo_core.algorithm.masking"} < set(loaded)
    assert set(loaded) <= set(imported_modules(SUPERVISED))
    assert "ppo_core.ppo.update" not in imported_modules(SUPERVISED)


@pytest.mark.slow
def test_the_list_of_ppo_has_every_module_that_the_command_loads(tmp_path: Path):
    flags = write_ppo_inputs(tmp_path) | {
        "output_dir": tmp_path / "out",
        "total_episodes": 8,
        "batch_size": 8,
        "response_length": 4,
    }
    words = printed_by(TRAIN_PPO, *(part for k, v in flags.items() for part in (f"--{k}", v)))
    loaded = words[words.index("loaded") + 1 :]
    assert {"ppo_core.ppo.update", "ppo_core.algorithm.advantages"} < set(loaded)
    assert set(loaded) <= set(imported_modules(PPO))


@pytest.mark.parametrize("entry", [SUPERVISED, *slow(PPO)])
def test_one_byte_of_each_listed_module_and_of_no_other_changes_the_digest(
    entry: str, tmp_path: Path
):
    shutil.copytree(ROOT / "ppo_core", tmp_path / "ppo_core")
    *changing, torch_is_loaded = printed_by(CHANGE_EACH, entry, source=tmp_path)
    assert sorted(changing) == list(imported_modules(entry))
    assert torch_is_loaded == "False"
