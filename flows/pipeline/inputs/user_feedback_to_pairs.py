"""Make pairs for training a reward model from the feedback of users."""

import math
from collections.abc import Sequence

import pyarrow

from pipeline.inputs.labeled_pairs import pair_key
from pipeline.inputs.training_pairs import MARGIN, PAIR_FIELDS
from ppo_core.data.rows.read_rows import Rows, derive, each
from ppo_core.data.rows.row_columns import WEIGHT, Row
from ppo_core.io.folder_cache import digest_of_code


def pairs_of_feedback(feedback: Rows, others: Sequence[Rows]) -> Rows:
    """Return feedback as training pairs; if only one response was judged, the other one is None.

    Pairs that are in `others` are left out.

    A missing response has a score of 0. So the loss of a judgment is the binary cross-entropy of
    sigmoid(score + c), where c is the log odds of a positive judgment among the weighted rows. Then
    an answer with score 0 has the average probability of a positive judgment. c is 0 if all
    judgments are equal.
    """
    liked = disliked = 0.0
    for row in feedback:
        liked += row[WEIGHT] * (row["rejected"] is None)
        disliked += row[WEIGHT] * (row["chosen"] is None)
    log_odds = math.log(liked / disliked) if liked and disliked else 0.0

    taken = {pair_key(row) for rows in others for row in rows}

    def convert(row: Row) -> Row | None:
        if pair_key(row) in taken:
            return None
        margin = log_odds * ((row["chosen"] is None) - (row["rejected"] is None))
        return {name: row[name] for name in (*PAIR_FIELDS, WEIGHT)} | {MARGIN: margin}

    types = feedback.table.features.arrow_schema
    fields = [types.field(name) for name in (*PAIR_FIELDS, WEIGHT)]
    schema = pyarrow.schema([*fields, pyarrow.field(MARGIN, pyarrow.float64())])
    code = digest_of_code(
        __name__, "pipeline.inputs.labeled_pairs", "pipeline.inputs.training_pairs"
    )
    inputs = {"others": [rows.digest for rows in others], "code": code}
    return derive(feedback, "pairs-of-feedback", inputs, each(convert), schema)
