"""Columns of the prompts' rows: which a function takes, and what happens to a misspelt one."""

import functools

import datasets
import numpy
import pytest

from ppo_core.data.prompt_set import make_prompt_set
from ppo_core.data.reward_columns import asked_columns, columns_of
from ppo_core.errors import ConfigError, DataError
from tests.helpers.models.tiny import make_policy, make_tokenizer
from tests.ppo_core.training.test_trainer import CONFIG

ROWS = [
    {"prompt": "w1", "reference": "w2", "level": 3},
    {"prompt": "w3", "reference": "w4", "level": None},
]


def two(prompts, responses): ...
def named(prompts, responses, reference): ...
def by_keyword(prompts, responses, *, level): ...
def with_default(prompts, responses, level=1, weight=2.0): ...
def everything(prompts, responses, **columns): ...
def both(prompts, responses, reference, *rest, **columns): ...
def plain(prompts, /, responses, **columns): ...


class Scorer:
    def __call__(self, prompts, responses, reference): ...


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (two, []),
        (named, ["reference"]),
        (by_keyword, ["level"]),
        (with_default, ["level"]),
        (everything, ["prompt", "reference", "level"]),
        (both, ["prompt", "reference", "level"]),
        (Scorer(), ["reference"]),
        (functools.partial(with_default, weight=1.0), ["level"]),
        # What is bound is the caller's own.
        (functools.partial(with_default, level=9), []),
        (functools.partial(named, reference=["w9"]), []),
        (functools.partial(everything, level=9), ["prompt", "reference"]),
        (max, []),
        (dict, []),
    ],
)
def test_a_function_takes_the_columns_that_it_names(function, columns):
    asked = asked_columns("mine", function)
    assert list(columns_of(ROWS, [asked])) == columns
    assert asked.is_empty == (not columns) or function is not two


def test_a_column_with_the_name_of_prompts_or_responses_is_no_keyword():
    rows = [{"prompts": "w1", "responses": ["a", "b"], "level": 1}]
    assert list(columns_of(rows, [asked_columns("mine", everything)])) == ["level"]
    # A positional-only parameter leaves its name free.
    assert list(columns_of(rows, [asked_columns("mine", plain)])) == ["prompts", "level"]


def test_a_column_whose_name_is_no_text_is_no_keyword():
    rows = [{"prompt": "w1", 7: "x"}]
    assert columns_of(rows, [asked_columns("mine", everything)]) == {"prompt": ["w1"]}


def test_a_row_without_a_value_has_none():
    rows = [{"prompt": "w1", "level": 3}, "w2", {"prompt": "w4"}]
    assert columns_of(rows, [asked_columns("mine", by_keyword)]) == {"level": [3, None, None]}


def misspelt(prompts, responses, refernce): ...
def capital(prompts, responses, REFERENCE): ...  # noqa: N803
def hyphen(prompts, responses, level_): ...
def foreign(prompts, responses, xyz): ...
def empty(prompts, responses, note): ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (misspelt, r"function mine needs the column 'refernce'.*Did you mean reference\? The col"),
        (capital, r"the column 'REFERENCE'.*Did you mean reference\?"),
        (hyphen, r"the column 'level_'.*Did you mean level\?"),
        (foreign, r"the column 'xyz', but no prompt has a value for it\. The columns are prompt, "),
        (empty, r"the column 'note', but no prompt has a value"),
    ],
)
def test_a_column_that_no_prompt_has_is_named_with_the_nearest(function, says):
    rows = [{**row, "note": None} for row in ROWS]
    with pytest.raises(ConfigError, match=says) as refused:
        columns_of(rows, [asked_columns("mine", function)])
    assert "prompt, reference, level" in str(refused.value)
    assert "note," not in str(refused.value).partition("The columns are")[2]


def test_prompts_alone_have_no_columns():
    with pytest.raises(ConfigError, match="The rows have no columns"):
        columns_of(["w1", "w2"], [asked_columns("mine", named)])


def prompt_set(dataset, *functions, collator=None):
    asked = [asked_columns(each.__name__, each) for each in functions]
    return make_prompt_set(dataset, make_tokenizer(), make_policy(), CONFIG, collator, asked)


class TorchRows:
    """A data set with a length and numbers only."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, number):
        return ROWS[number % len(ROWS)]


def tokens_of(rows):
    return {"input_ids": [make_tokenizer()(row["prompt"])["input_ids"] for row in rows]}


@pytest.mark.parametrize(
    ("dataset", "collator"),
    [
        (ROWS, None),
        (datasets.Dataset.from_list(ROWS), None),
        ((row for row in ROWS), None),
        (TorchRows(), None),
        (ROWS, tokens_of),
    ],
    ids=["list", "Dataset", "generator", "torch", "collator"],
)
def test_every_form_of_data_set_keeps_the_columns_that_are_asked_for(dataset, collator):
    prompts = prompt_set(dataset, named, collator=collator)
    assert prompts.columns == {"reference": ["w2", "w4"]}
    assert len(prompts.prompts) == 2
    assert prompts.columns_at([1, 1, 0]) == {"reference": ["w4", "w4", "w2"]}
    assert prompts.first(1).columns == {"reference": ["w2"]}


def test_nothing_is_kept_that_nobody_asks_for():
    assert prompt_set(ROWS).columns == {}


@pytest.mark.parametrize(("dataset", "says"), [("w1", "a single text"), ({"train": ROWS}, "split")])
def test_what_is_no_data_set_is_refused_as_without_columns(dataset, says):
    with pytest.raises(DataError, match=says):
        prompt_set(dataset, named)


def test_the_digest_of_prompts_tells_columns_apart_in_every_process():
    without, rows = prompt_set(ROWS), [{**row, "reference": "w9"} for row in ROWS]
    assert without.digest() == prompt_set(rows).digest()
    digests = [prompt_set(each, named).digest() for each in (ROWS, rows)]
    assert len({without.digest(), *digests}) == 3
    # The text of an object would hold its address.
    images = [[{**row, "reference": each()} for row in ROWS] for each in (object, object)]
    arrays = [[{**row, "reference": numpy.array([n])} for row in ROWS] for n in (1, 2)]
    assert len({prompt_set(each, named).digest() for each in (*images, *arrays)}) == 3
