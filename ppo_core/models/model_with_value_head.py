"""Language models with a value head, for the PPO loop of `ppo_core.classic`.

The critic that `PPOTrainer` trains is in `ppo_core.models.critic`.
"""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import add_adapter, checkpoint_activations, is_peft, plain_model
from ppo_core.models.files.adapter_weights import lift_adapter
from ppo_core.models.files.saved_precision import cast_weights, name_dtype
from ppo_core.models.files.value_head_files import PREFIX, SavedHead, load_with_head, save_head
from ppo_core.models.reward_adapter import AdapterClassifier, load_adapter_classifier

_POLICY_PREFIX = "pretrained_model."
_NOT_OF_POLICY = (PREFIX, "_reward_adapter.")
"""Name prefixes of the tensors that are not the policy's."""

_HEAD_SETTINGS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")


class ValueHead(nn.Module):
    """Dropout and a linear layer from hidden states (..., D) to values (..., 1)."""

    def __init__(self, hidden_size: int, *, dropout: float) -> None:
        """Create a head with torch's default initialization."""
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.summary = nn.Linear(hidden_size, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Return values (..., 1) of hidden states (..., D), computed in the head's precision."""
        values: Tensor = self.summary(self.dropout(states.to(self.summary.weight.dtype)))
        return values


class ModelWithValueHead(nn.Module, PushToHubMixin):
    """Base class of causal and sequence-to-sequence models with a value head."""

    transformers_parent_class: ClassVar[Any]
    """Auto class of transformers that loads the policy."""

    _has_encoder: ClassVar[bool]

    def __init__(
        self,
        pretrained_model: nn.Module,
        *,
        summary_dropout_prob: float | None = None,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float | None = None,
    ) -> None:
        """Add a new value head to a transformers model or a PeftModel.

        The given model is not modified. The value head reads the input of the LM head, and computes
        in fp32 or a higher precision. `summary_dropout_prob` is the dropout probability of the
        value head. Its default is the value in the model's configuration, or 0.1 without such a
        value. By default the head has torch's initialization. With `v_head_init_strategy="normal"`,
        its weights are drawn from a normal distribution of standard deviation
        `v_head_initializer_range` (default 0.2), and its bias is 0.

        Raises:
            ModelError: this class does not support the model.
            ConfigError: a setting of the value head is invalid, or two settings contradict each
                other.
        """
        super().__init__()
        policy = plain_model(pretrained_model)
        _check_policy(policy, has_encoder=self._has_encoder)
        self.pretrained_model: Any = pretrained_model
        if summary_dropout_prob is None:
            summary_dropout_prob = getattr(policy.config, "summary_dropout_prob", 0.1)
        lm_head = policy.get_output_embeddings()
        self.v_head = ValueHead(lm_head.in_features, dropout=summary_dropout_prob)
        self.v_head.to(
            device=lm_head.weight.device, dtype=torch.promote_types(policy.dtype, torch.float32)
        )
        _initialize(self.v_head, v_head_init_strategy, v_head_initializer_range)
        self._reward_adapter: AdapterClassifier | None = None
        self.saved_dtype: torch.dtype | None = None
        self.register_state_dict_post_hook(_name_as_policy)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_name_as_wrapper)  # type: ignore[no-untyped-call]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | nn.Module,
        *,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        peft_config: Any = None,
        is_trainable: bool = True,
        reward_adapter: str | Path | None = None,
        reward_adapter_name: str = "reward_adapter",
        **kwargs: Any,
    ) -> Self:
        """Return a model with its saved value head, or with a new head if none was saved.

        The first argument is a model, or the folder or hub id of a model or adapter. `peft_config`
        adds a new adapter; `is_trainable` applies to a loaded adapter. `reward_adapter` is the
        folder or hub id of an adapter for `compute_reward_score`. `dtype` (formerly
        `torch_dtype`) defaults to fp32, because small updates are lost in half precision. With
        this default, the model is saved in the precision of the loaded files. Settings of the
        value head are passed to the constructor. All other arguments, such as
        quantization_config, device_map and revision, are passed to transformers.

        Raises:
            ModelError: loading model or value head fails, or would need a pickle or remote code.
            ConfigError: arguments contradict each other.
        """
        head_settings = {name: kwargs.pop(name) for name in _HEAD_SETTINGS if name in kwargs}
        if dtype is not None and torch_dtype is not None:
            raise ConfigError(f"{dtype=} and {torch_dtype=} are the same setting. Pass only dtype.")
        if dtype := dtype or torch_dtype:
            kwargs["dtype"] = dtype
        policy: Any = pretrained_model_name_or_path
        head = written = None
        if isinstance(policy, str | Path):
            kwargs = {"dtype": torch.float32, **kwargs}
            policy, head, written = load_with_head(
                cls.transformers_parent_class, policy, kwargs, is_trainable=is_trainable
            )
        elif kwargs:
            raise ConfigError(
                f"{', '.join(kwargs)} would have no effect, because the model is loaded already. "
                "Pass these arguments when you load the model, or pass a path instead of a model."
            )
        if peft_config is not None:
            policy = add_adapter(policy, peft_config)
        model = cls(policy, **head_settings)
        model.saved_dtype = None if dtype else written
        if head is not None:
            model._load_head(head)
        if reward_adapter is not None:
            model._load_reward_adapter(reward_adapter, reward_adapter_name)
        return model

    @property
    def config(self) -> Any:
        """Return the configuration of the policy."""
        return self.pretrained_model.config

    @property
    def device(self) -> torch.device:
        """Return the device of the policy's weights."""
        return self.pretrained_model.device

    @property
    def is_peft_model(self) -> bool:
        """Return whether the policy is a PeftModel."""
        return is_peft(self.pretrained_model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return logits (B, S, V), loss and values (B, S) of the S tokens that the decoder reads.

        Logits and values are in fp32 or a higher precision. The transformers model computes the
        loss, which is None without `labels`. With `return_past_key_values` the cache is a fourth
        result. Other arguments are passed to the transformers model.
        """
        lm_head = self.pretrained_model.get_output_embeddings()
        head_inputs: list[Tensor] = []
        # The LM head's input is the last hidden state after norm, projection (OPT) and scaling
        # (T5). A hook reads it, because output_hidden_states would keep the states of all layers.
        with lm_head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0])):
            output = self.pretrained_model(
                input_ids=input_ids, attention_mask=attention_mask, **kwargs
            )
        (states,) = head_inputs
        values = self.v_head(states.to(self.v_head.summary.weight.device))[..., 0]
        logits = at_least_fp32(output.logits)
        result = (logits, output.loss, at_least_fp32(values).to(logits.device))
        return (*result, output.past_key_values) if return_past_key_values else result

    @torch.no_grad()
    def compute_reward_score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return scores (B, S, L) of each token (B, S) for each of the reward adapter's L labels.

        Raises:
            ModelError: the model was loaded without a `reward_adapter`.
        """
        if self._reward_adapter is None:
            raise ModelError(
                "The model has no reward adapter. Load the model by from_pretrained(..., "
                "peft_config=..., reward_adapter=PATH)."
            )
        states = self._reward_adapter.base_model(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        ).last_hidden_state
        score = self._reward_adapter.score.to(states.device)
        return at_least_fp32(score(states.to(score.weight.dtype)))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the policy's `generate` (`transformers.GenerationMixin.generate`)."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute activations in the backward pass to save memory (TRL #5245).

        Raises:
            ConfigError: the policy has adapters, and an argument other than use_reentrant=False is
                given.
        """
        if not is_peft(self.pretrained_model):
            self.pretrained_model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=gradient_checkpointing_kwargs
            )
        elif gradient_checkpointing_kwargs in (None, {"use_reentrant": False}):
            checkpoint_activations(self.pretrained_model)
        else:
            raise ConfigError(
                f"{gradient_checkpointing_kwargs=} could recompute activations with another "
                "adapter than in the forward pass, and give wrong gradients. Leave "
                "gradient_checkpointing_kwargs out: the default is non-reentrant."
            )

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations for the backward pass."""
        self.pretrained_model.activation_checkpointing_disable()

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save the policy as a plain checkpoint, and the value head in `value_head.safetensors`.

        transformers (or peft, for an adapter) loads the folder as the policy. `from_pretrained` of
        this class also loads the value head. The weights are written in `saved_dtype`, the
        precision of the loaded files. An adapter, or a model whose `saved_dtype` is None, is
        written in the precision of training. If this model's weights are sharded, pass its
        unsharded `state_dict`. Other arguments, such as `max_shard_size`, are passed to the policy;
        an adapter is always one file.

        Raises:
            ConfigError: `safe_serialization=False` or `push_to_hub=True` is given.
            ModelError: the `state_dict` lacks the tensors of the policy or of the value head.
        """
        if not kwargs.pop("safe_serialization", True):
            raise ConfigError(
                "safe_serialization=False would write a pickle, which from_pretrained does not "
                "read. Leave safe_serialization out; weights are then written as safetensors."
            )
        if kwargs.pop("push_to_hub", False):
            raise ConfigError(
                "push_to_hub=True would not upload the value head. Call push_to_hub() instead."
            )
        dtype = None if self.is_peft_model else self.saved_dtype
        if dtype is not None:
            state_dict = cast_weights(state_dict or self.state_dict(keep_vars=True), dtype)
        head = self.v_head.state_dict()
        if state_dict is not None:
            kwargs["state_dict"], head = _policy_and_head(state_dict)
        if is_adapter := self.is_peft_model and "selected_adapters" not in kwargs:
            kwargs["selected_adapters"] = [self.pretrained_model.active_adapter]
        self.pretrained_model.save_pretrained(
            save_directory, is_main_process=is_main_process, **kwargs
        )
        if is_main_process:
            save_head(head, save_directory)
            if is_adapter:
                lift_adapter(save_directory, self.pretrained_model.active_adapter)
            if dtype is not None:
                name_dtype(save_directory, dtype)

    def _load_reward_adapter(self, path: str | Path, name: str) -> None:
        if not is_peft(self.pretrained_model):
            raise ModelError(
                f"reward_adapter={str(path)!r} needs a policy with an adapter of its own. Pass a "
                "peft_config, too."
            )
        self._reward_adapter = load_adapter_classifier(self.pretrained_model, path, name)

    def _load_head(self, saved: SavedHead) -> None:
        own = self.v_head.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.tensors.items()}
        if shapes != (expected := {name: tuple(tensor.shape) for name, tensor in own.items()}):
            raise ModelError(
                f"The saved value head has the shapes {shapes}, but this model needs {expected}: "
                "the value head was trained on another model. Load that model, or delete the file "
                "of the value head to begin with a new one."
            )
        tensors = dict(saved.tensors)
        if saved.of_trl and getattr(self.config, "scale_decoder_outputs", False):
            # TRL's head reads T5's states before their scaling by D**-0.5, and our head after it.
            tensors["summary.weight"] = tensors["summary.weight"] * self.config.d_model**0.5
        self.v_head.load_state_dict(tensors)


class AutoModelForCausalLMWithValueHead(ModelWithValueHead):
    """A decoder-only language model with a value head."""

    transformers_parent_class = AutoModelForCausalLM
    _has_encoder = False


class AutoModelForSeq2SeqLMWithValueHead(ModelWithValueHead):
    """An encoder-decoder language model with a value head on its decoder."""

    transformers_parent_class = AutoModelForSeq2SeqLM
    _has_encoder = True


def _check_policy(policy: PreTrainedModel, *, has_encoder: bool) -> None:
    name = type(policy).__name__
    if policy.get_output_embeddings() is None:
        raise ModelError(
            f"{name} has no language-model head, so it cannot sample tokens. Load the model as a "
            "...ForCausalLM or ...ForConditionalGeneration."
        )
    head = policy.get_output_embeddings()
    if not hasattr(head, "in_features"):
        raise ModelError(
            f"The language-model head of {name} is a {type(head).__name__} instead of a linear "
            "layer, so its hidden states cannot be read. Use another model."
        )
    if policy.config.is_encoder_decoder != has_encoder:
        has, other = ("no encoder", "CausalLM") if has_encoder else ("an encoder", "Seq2SeqLM")
        raise ModelError(f"{name} has {has}: use AutoModelFor{other}WithValueHead.")
    if any(parameter.is_meta for parameter in policy.parameters()):
        raise ModelError(
            f"Weights of {name} are offloaded to CPU or disk, where they cannot be trained. Use a "
            "device_map that places all weights on GPUs."
        )


def _initialize(head: ValueHead, strategy: str | None, std: float | None) -> None:
    if strategy not in (None, "normal"):
        raise ConfigError(f"v_head_init_strategy={strategy!r} must be 'normal' or None.")
    if strategy is None and std is not None:
        raise ConfigError(
            f"v_head_initializer_range={std} takes effect only with "
            "v_head_init_strategy='normal'. Set both or neither."
        )
    if strategy == "normal":
        nn.init.normal_(head.summary.weight, std=0.2 if std is None else std)
        nn.init.zeros_(head.summary.bias)


def _name_as_policy(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Give the policy's tensors the names that they have in the policy's own state_dict."""
    own = prefix + _POLICY_PREFIX
    for name in [name for name in state_dict if name.startswith(own)]:
        state_dict[prefix + name.removeprefix(own)] = state_dict.pop(name)


def _name_as_wrapper(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *details: object
) -> None:
    """Undo `_name_as_policy` in a state_dict before it is loaded."""
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    for name in names:
        if not name.startswith(_NOT_OF_POLICY):
            state_dict[prefix + _POLICY_PREFIX + name] = state_dict.pop(prefix + name)


def _policy_and_head(
    state_dict: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    policy = {
        name: value for name, value in state_dict.items() if not name.startswith(_NOT_OF_POLICY)
    }
    head = {
        name.removeprefix(PREFIX): value
        for name, value in state_dict.items()
        if name.startswith(PREFIX)
    }
    if not policy or not head:
        raise ModelError(
            f"The state_dict has {len(policy)} tensors of the policy and {len(head)} of the value "
            "head, so it is not from a model with a value head. Pass the state_dict of the model "
            "with its value head."
        )
    return policy, head
