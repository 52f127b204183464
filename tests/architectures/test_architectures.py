"""Every model type of transformers trains with its own log-probabilities, or is refused by name."""

import pytest

from tests.architectures.measure import measure
from tests.architectures.zoo import CAUSAL, MULTIMODAL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [*CAUSAL, *MULTIMODAL])
def test_a_model_type_is_exact_or_refused(name: str):
    result = measure(name)
    assert result.outcome in ("exact", "refused", "not built"), result
