"""What oneDNN keeps of the matrix products that it has prepared itself for.

It compiles code for each new shape, about a MiB of it, and PyTorch keeps 1,024 such products, as
oneDNN itself does once more. A training has a new shape with every length of its rows: after five
updates of a model of 31 million weights in bfloat16 the process had 2.3 GiB, and with 48 kept each
1.7 GiB, in about the same time.
"""

import os

KEPT = 48
"""Products: in a pass both ways a layer has some thirty in bfloat16, its attention among them; with
24 kept such a training took 3 to 8 % more time."""


def keep_few_prepared_products() -> None:
    """Have this process keep no more than `KEPT`, where the environment does not say how many.

    Both libraries read that at their first product; what multiplied before this is called goes on
    to keep 1,024.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(KEPT))
