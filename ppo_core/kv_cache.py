"""The keys and values of a rollout, in memory that is reserved once."""

from collections.abc import Sequence

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """A cache of transformers, with the kind of layer that each layer of the model needs."""
    return DynamicCache(config=config)


def keeps_all(cache: Cache) -> bool:
    """Whether every layer keeps the keys and values of all places, and nothing else."""
    return bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


class _ReservedLayer(DynamicLayer):
    """Room for all places of a rollout: a new one is written, and those before stay in place."""

    def __init__(self, room: tuple[Tensor, Tensor], places: int) -> None:
        """Take keys and values (B, heads, room, size), of which the first places are taken."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = room
        self.dtype, self.device = room[0].dtype, room[0].device
        self.is_initialized = True
        self._show(places)

    def _show(self, places: int) -> tuple[Tensor, Tensor]:
        keys, values = self._room
        self.keys, self.values = keys[:, :, :places], values[:, :, :places]
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write those of new places; returns keys and values of all."""
        seen = self.get_seq_length()
        places = seen + key_states.shape[-2]
        for part, new in zip(self._room, (key_states, value_states), strict=True):
            part[:, :, seen:places] = new
        return self._show(places)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows alone, moved together; the memory stays reserved."""
        places = self.get_seq_length()
        for part in self._room:
            part[: len(indices), :, :places] = part[indices, :, :places]
        keys, values = self._room
        self._room = keys[: len(indices)], values[: len(indices)]
        self._show(places)

    def reset(self) -> None:
        """Give the memory back."""
        super().reset()
        del self._room


def joined(caches: Sequence[Cache], rows: Sequence[Tensor], *, width: int, room: int) -> Cache:
    """One cache of the last `width` places of several, with room for so many places in all.

    Rows are aligned on the right; `rows` are those of each cache in the whole. Places before the
    first of a row are 0. Each of the caches is emptied as it is copied.
    """
    whole = DynamicCache()
    number = sum(map(len, rows))
    for n in range(len(caches[0].layers)):
        parts: list[Tensor] = []
        for kind in ("keys", "values"):
            first = getattr(caches[0].layers[n], kind)
            part = first.new_zeros(number, first.shape[1], room, first.shape[-1])
            for cache, own in zip(caches, rows, strict=True):
                tensor = getattr(cache.layers[n], kind)[:, :, -width:]
                part[own, :, width - tensor.shape[-2] : width] = tensor
            parts.append(part)
        for cache in caches:
            cache.layers[n].reset()
        whole.layers.append(_ReservedLayer((parts[0], parts[1]), width))
    return whole
