"""TRL 0.11's loop: a script samples and scores, and the trainer takes PPO steps.

    for batch in trainer.dataloader:
        responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=32)
        scores = [reward(text) for text in tokenizer.batch_decode(responses)]
        stats = trainer.step(batch["input_ids"], responses, scores)
        trainer.log_stats(stats, batch, scores)

Names and arguments are as in TRL's PPO up to 0.11. `step` and `ppo_core.PPOTrainer` share the code
of the PPO update.
"""

from transformers import set_seed
from transformers.utils.import_utils import is_torch_npu_available as is_npu_available
from transformers.utils.import_utils import is_torch_xpu_available as is_xpu_available

from ppo_core.algorithm.masking import masked_mean, masked_var
from ppo_core.algorithm.whitening import masked_whiten, whiten
from ppo_core.models.model_with_value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from ppo_core.models.reference import create_reference_model
from ppo_core.trl.classic.classic_config import ClassicPPOConfig as PPOConfig
from ppo_core.trl.classic.classic_trainer import ClassicPPOTrainer as PPOTrainer
from ppo_core.trl.classic.sampling import LengthSampler, respond_to_batch

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "create_reference_model",
    "is_npu_available",
    "is_xpu_available",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "respond_to_batch",
    "set_seed",
    "whiten",
]
