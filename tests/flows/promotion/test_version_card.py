"""The model card of a version: whole, escaped, and free of this machine's folders."""

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from pipeline.inputs.lineage import DataSet
from pipeline.promotion.version_card import (
    LIMITS,
    SHOWN_SAMPLES,
    NamedModel,
    VersionFacts,
    version_card,
)
from tests.helpers.inputs.sample_reports import (
    changed,
    decision,
    evaluation_result,
    run_cost,
    win_rate,
)

EVALUATION = evaluation_result()

MARKUP = "<script>alert(1)</script> | [x](javascript:y) ![i](http://h) **b** `c`"
NASTY = f"{MARKUP}\n\n# head\n---\x1b[2J"


def make_facts(contest: str = "ppo_vs_sft", **changes: Any) -> VersionFacts:
    """What a card says about version 7; `contest` is the only one of its evaluation."""
    rate = win_rate(
        **{"rate": 0.625, "low": 0.5312, "high": 0.71, "n": 96, "ties": 4, "judge": "python:j"},
        **{"length_controlled": 0.58, "equal_length_pairs": 40},
    )
    facts = VersionFacts(
        name="rlhf-policy",
        version=7,
        models={
            "base": NamedModel(name="org/tiny", digest="c0ffee"),
            "judge": NamedModel(name="python:judge.py:judge", digest="1"),
        },
        data=[
            DataSet(
                name="prompts",
                source="prompts.jsonl",
                digest="beef",
                rows=1234,
                left_out={"with an empty prompt": 2, "with more than 60 tokens": 1},
            )
        ],
        evaluation=replace(
            EVALUATION, win_rate={contest: rate}, kl={"ppo": 3.14159265}, notes=[], reasons=[]
        ),
        cost=run_cost(),
        decoding={"max_new_tokens": 53, "do_sample": False},
        samples=[{"prompt": "a question", "sft": "an answer", "ppo": "a better one"}],
        decision=None,
        settings={"seed": 1, "ppo": {"learning_rate": 3e-6}},
    )
    return replace(facts, **changes)


class Page(HTMLParser):
    """The tags, addresses and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data):
        self.text += data


def render(card):
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    page = Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(body))
    return yaml.safe_load(head), page


def test_the_card_says_what_was_won_by_whom_and_how_surely():
    card = version_card(make_facts())
    assert "| PPO against SFT | 62.5% | 53.1% .. 71.0% | 58.0% | 96 | 4 | python:j |" in card
    assert "| kl/ppo | 3.142 |" in card
    left_out = "2 with an empty prompt, 1 with more than 60 tokens"
    assert f"| prompts | prompts.jsonl | 1234 | {left_out} | beef |" in card
    assert "| ppo.learning\\_rate | 3e-06 |" in card
    assert "| judge | python:judge.py:judge | 1 |" in card


def test_the_card_says_where_there_is_no_rate_at_equal_length():
    none = {"length_controlled": None, "equal_length_pairs": 0}
    path = "evaluation.win_rate.ppo_vs_sft"
    facts = changed(make_facts(), {f"{path}.{name}": value for name, value in none.items()})
    assert "71.0% | not measurable, 0 of 96 | 96 |" in version_card(facts)


def test_a_figure_of_the_table_of_win_rates_is_not_repeated_as_a_metric():
    card = version_card(make_facts())
    assert card.count("| win\\_rate/") == 1
    assert "| win\\_rate/ppo\\_vs\\_sft/flip\\_rate | 0.1 |" in card


def test_the_head_is_that_of_the_hub():
    head, _ = render(version_card(make_facts()))
    assert head["base_model"] == "org/tiny"
    assert head["library_name"] == "transformers"
    assert head["pipeline_tag"] == "text-generation"


def test_the_card_says_what_the_version_is_not_for_and_how_to_load_it():
    _, page = render(version_card(make_facts()))
    for limit in LIMITS:
        assert limit in page.text
    assert 'mlflow.transformers.load_model("models:/rlhf-policy/7")' in page.text
    assert "pipeline(prompt, return_full_text=False) returns the answer alone" in page.text


def test_the_decision_stands_with_every_reason_once_it_is_made():
    assert "Not decided yet." in version_card(make_facts())
    made = decision("refused", reasons=("Too long.", "Too sure."))
    card = version_card(make_facts(decision=made))
    assert "**Refused** by run RLHF/3 at 2026-01-01T00:00:00+00:00." in card
    assert "- Too long.\n- Too sure." in card
    assert "Not decided yet." not in card


def test_doubts_about_the_evaluation_stand_below_the_win_rates():
    doubts = {"notes": ["It is weak."], "reasons": ["The judge follows the position."]}
    facts = make_facts()
    card = version_card(replace(facts, evaluation=replace(facts.evaluation, **doubts)))
    assert "\n- It is weak.\n- Inconclusive: " in card
    assert "- Inconclusive: The judge follows the position." in card


def test_the_card_says_what_the_run_has_cost_by_step():
    card = version_card(make_facts())
    assert "1.00 GPU hours, 0.53 CPU hours; 10,000 tokens sampled" in card
    assert "40 calls of judges with 20,000 tokens; 6.90 US dollars for GPUs and judges." in card
    assert "| train\\_policy | 2 | 3600 | 1800 |" in card


def test_a_version_without_a_number_has_no_number():
    card = version_card(make_facts(version=None))
    assert "# rlhf-policy\n" in card
    assert '"models:/rlhf-policy/VERSION"' in card


def facts_of(text: str) -> VersionFacts:
    """Facts in which everything that can be text is this one."""
    facts = make_facts(text)
    rates = {text: replace(facts.evaluation.win_rate[text], judge=text)}
    return replace(
        facts,
        models={
            text: NamedModel(name=text, digest=text),
            "base": NamedModel(name=text, digest="c"),
        },
        data=[DataSet(name=text, source=text, digest=text, rows=1, left_out={text: 2})],
        evaluation=replace(facts.evaluation, win_rate=rates, reasons=[text], distinct={text: 1.0}),
        cost=run_cost(steps={text: run_cost().steps["train_policy"]}),
        decoding={text: text},
        samples=[{text: text, "ppo": text}],
        decision=replace(decision(), action=text, reasons=(text,), by=text, at=text),
        settings={text: {text: text}},
    )


@pytest.mark.parametrize("text", [NASTY, "# head", "1. one", "- one", "> quoted", "=", "---"])
def test_nothing_that_a_model_or_a_data_set_wrote_becomes_markup(text):
    card = version_card(facts_of(text))
    assert "\x1b" not in card
    head, page = render(card)
    _, plain = render(version_card(facts_of("plain")))
    assert head["base_model"] == text
    # An address of the text is in a `code`.
    shown = [[tag for tag in one.tags if tag not in ("br", "code")] for one in (page, plain)]
    assert shown[0] == shown[1]
    assert page.addresses == ["https://arxiv.org/abs/1707.06347"]
    assert page.text.count(text.split("\n")[0]) >= 15


@pytest.mark.parametrize("path", ["/home/anna/prompts.jsonl", "C:\\anna\\prompts.jsonl"])
def test_no_folder_of_this_machine_is_in_the_card(path):
    data = DataSet(name="prompts", source=path, digest="d", rows=3)
    card = version_card(
        make_facts(
            data=[data],
            models={"base": NamedModel(name=path, digest="d")},
            settings={"prompts": path, "ppo": {"output_dir": path}},
        )
    )
    assert "anna" not in card
    assert "prompts.jsonl" in card


def test_only_the_first_samples_are_shown_and_none_need_be_there():
    rows = [
        {"prompt": f"question {number}", "ppo": "answer"} for number in range(SHOWN_SAMPLES + 3)
    ]
    card = version_card(make_facts(samples=rows))
    assert f"question {SHOWN_SAMPLES - 1}" in card
    assert f"question {SHOWN_SAMPLES}" not in card
    assert "## Samples" not in version_card(make_facts(samples=[]))
