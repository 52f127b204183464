"""The keys and values of a rollout, in memory that is reserved once."""

from typing import cast

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """A cache of transformers, with the kind of layer that each layer of the model needs."""
    return DynamicCache(config=config)


def keeps_all(cache: Cache) -> bool:
    """Whether every layer keeps the keys and values of all places, and nothing else."""
    return bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


def can_choose_rows(cache: Cache) -> bool:
    """Whether a pass filled the cache, and some of its rows can go on without the others."""
    layers = cache.layers
    return bool(layers) and all(
        getattr(layer, "is_initialized", False) and hasattr(layer, "batch_select_indices")
        for layer in layers
    )


class _ReservedLayer(DynamicLayer):
    """Room for all places of a rollout: a new one is written, and those before stay in place."""

    def __init__(self, like: DynamicLayer, rows: int, places: int) -> None:
        """Reserve so many rows and places for keys and values like those of another layer."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = [
            part.new_zeros(rows, part.shape[1], places, part.shape[3]) for part in _parts(like)
        ]
        self.dtype, self.device = like.dtype, like.device
        self.is_initialized = True
        self.show(0, 0)

    def show(self, rows: int, places: int) -> None:
        """Let these first rows and places be what the layer holds."""
        # `get_seq_length` is 0 without a row.
        self._end = places
        self.keys, self.values = (part[:rows, :, :places] for part in self._room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write those of new places; returns keys and values of all."""
        rows, before = len(key_states), self._end
        places = before + key_states.shape[-2]
        for part, new in zip(self._room, (key_states, value_states), strict=True):
            part[:rows, :, before:places] = new
        self.show(rows, places)
        keys, values = (part[:rows, :, :places] for part in self._room)
        return keys, values

    def move(self, rows: Tensor, span: int, places: int) -> None:
        """Hold the last `span` places of these rows (b,) alone, to end at so many places."""
        end = self._end
        for part in self._room:
            part[: len(rows), :, places - span : places] = part[rows, :, end - span : end]
        self.show(len(rows), places)

    def put(self, rows: Tensor, other: DynamicLayer) -> None:
        """Write what another layer holds of rows (b,), to end where this one ends."""
        end = self._end
        start = end - other.get_seq_length()
        for part, new in zip(self._room, _parts(other), strict=True):
            # What is hidden from a row must be a number all the same.
            part[rows, :, :start] = 0
            part[rows, :, start:end] = new


class ReservedCache(DynamicCache):
    """Rows that are aligned on the right, in memory that is reserved once."""

    def __init__(self, like: Cache, rows: int, places: int) -> None:
        """Reserve so many rows and places for the layers of another cache, which `keeps_all`."""
        super().__init__()
        self._reserved = [_ReservedLayer(layer, rows, places) for layer in _layers(like)]
        self.layers = [*self._reserved]

    def show(self, rows: int, places: int) -> None:
        """Let these first rows and places be what the cache holds."""
        for layer in self._reserved:
            layer.show(rows, places)

    def move(self, rows: Tensor, span: int, places: int) -> None:
        """Hold the last `span` places of these rows (b,) alone, to end at so many places."""
        for layer in self._reserved:
            layer.move(rows, span, places)

    def put(self, rows: Tensor, other: Cache) -> None:
        """Write what another cache holds of rows (b,), to end where this one ends.

        The other is emptied as it is copied.
        """
        for layer, new in zip(self._reserved, _layers(other), strict=True):
            layer.put(rows, new)
            new.reset()


def _layers(cache: Cache) -> list[DynamicLayer]:
    return cast(list[DynamicLayer], cache.layers)


def _parts(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    return cast(Tensor, layer.keys), cast(Tensor, layer.values)
