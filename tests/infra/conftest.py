from collections.abc import Iterator

import pytest

from tests.helpers.aws.stacks import Cloud, cloud, parameters

STACK = "rlhf"


@pytest.fixture(scope="module")
def deployed() -> Iterator[Cloud]:
    """A cloud with the stacks of infra/aws under the name `rlhf`."""
    with cloud() as made:
        values = parameters()
        values["Certificate"] = made.certificate(values["Domain"])
        made.create(STACK, values)
        yield made
