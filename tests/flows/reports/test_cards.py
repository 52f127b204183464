"""What a person looks at: the cards of a real run, and the page beside the MLflow run."""

import base64
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.registry.decisions import Decision
from pipeline.reports.charts import draw_chart
from pipeline.reports.document import (
    Answer,
    Chart,
    Curve,
    Document,
    NamedRates,
    Reading,
    Section,
    ShownProgress,
    as_evidence,
)
from pipeline.reports.evaluation_report import evaluation_document
from pipeline.reports.headline_metrics import evaluation_numbers
from pipeline.reports.html_page import document_page
from pipeline.reports.live.live_card import LiveCard
from pipeline.reports.promotion_report import promotion_document
from pipeline.reports.reward_model_report import reward_document
from pipeline.reports.terminal import render_places, render_summary
from pipeline.results.evaluation import (
    AnnotatorTest,
    CanaryKind,
    ContestResult,
    EnsembleAgreement,
    Evaluation,
    LengthBin,
    PairAgreement,
    TrainedJudge,
)
from pipeline.results.step_records import Change, EvaluatedPolicy, RegisteredPolicy
from pipeline.settings.gate_configs import PromotionConfig
from pipeline.stages.cards import evaluation_card, promotion_card, reward_model_card
from pipeline.storage.workspace import Workspace
from tests.helpers.inputs.sample_reports import (
    HOSTILE,
    changed,
    decision,
    evaluated,
    evaluation_result,
    guard_result,
    reward_report,
    summary,
    validated,
)
from tests.helpers.paths import ROOT

RUN = FlowRun(id="RLHF/1", workspace=Workspace("outputs"), tracking={}, origin={}, data=[])
"""A run on one disk."""

CHROMIUM = shutil.which("chromium")

ALTERNATIVE = (
    "For each person: who agrees more with the other people, the judge or this person? "
    "(alternative annotator test)"
)
WITHOUT_PPO = "What SFT reaches without PPO, on the same prompts"

FLOW = """
import pickle
import time
from pathlib import Path
from metaflow import FlowSpec, card, current, step
from pipeline import stages
from pipeline.reports.live.live_card import LiveCard

class CardFlow(FlowSpec):
    @card(type="blank")
    @step
    def start(self):
        with open("records.pickle", "rb") as file:
            (self.validation, self.registered, self.limits, self.tracked, self.trainings) = (
                pickle.load(file)
            )
        current.card.extend(stages.cards.reward_model_card(self.validation, self.tracked))
        self.next(self.evaluate)

    @card(type="blank")
    @step
    def evaluate(self):
        components = stages.cards.evaluation_card(self.registered.evaluation, [], self.tracked)
        current.card.extend(components)
        self.next(self.register)

    @card(type="blank")
    @step
    def register(self):
        current.card.extend(
            stages.cards.promotion_card(
                self.registered, self.validation, self.limits, self.tracked
            )
        )
        self.next(self.train)

    @card(type="blank", id="training", refresh_interval=0)
    @step
    def train(self):
        running, last = self.trainings
        shown = LiveCard(current.card)
        shown.show(running)
        end = time.monotonic() + 60
        while not (kept := [*Path(".metaflow/mf.cards").glob("**/train/**/*.html")]):
            assert time.monotonic() < end
            time.sleep(0.05)
        Path("running.html").write_bytes(kept[0].read_bytes())
        shown.keep(last)
        self.next(self.end)

    @step
    def end(self):
        pass

if __name__ == "__main__":
    CardFlow()
"""


class Elements(HTMLParser):
    """Tags, attributes and text of a page as a browser has built it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def addresses(self) -> list[str]:
        return [value for name, value in self.attributes if name in ("src", "href")]


def assert_inert(elements: Elements) -> None:
    """The hostile text is there, as text; no element of the page is made of it."""
    assert HOSTILE in "".join(elements.texts)
    assert not any(name.startswith("on") for name, _ in elements.attributes)
    assert not any("javascript:" in address for address in elements.addresses())
    assert not any("192.0.2.1" in address for address in elements.addresses())
    # The title is the name of the task or the subject: "fell" had the script or the image run.
    assert "fell" not in elements.texts


def rendered(html_file: Path, profile: Path) -> str:
    """The page after Chromium has run its scripts."""
    switches = "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync dump-dom"
    switches += " disable-background-networking disable-component-update"
    ran = subprocess.run(
        [
            str(CHROMIUM),
            *(f"--{switch}" for switch in switches.split()),
            f"--user-data-dir={profile}",
            "--virtual-time-budget=5000",
            html_file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout


def components(card: Path) -> list[dict[str, Any]]:
    """What a card holds, from the data that its page carries."""
    (data,) = re.findall(r'window\.__MF_DATA__\["[^"]+"\] = "([^"]+)"', card.read_text())
    (page,) = json.loads(base64.b64decode(data))["components"]
    (section,) = page["contents"]
    return section["contents"]


def row_of(document: Document, title: str, name: str) -> tuple[str, ...]:
    (section,) = [section for section in document.sections if section.title == title]
    (row,) = [row for row in section.rows if row[0] == name]
    return row


def register(made: Decision, evaluation: Evaluation, folder: Path) -> RegisteredPolicy:
    return RegisteredPolicy(
        model={},
        promotion=made,
        evaluation=evaluated(evaluation, folder),
        kl=12.3,
        alpha=0.0001,
        earlier_decisions=4,
        previous=2,
    )


def changed_answers() -> tuple[Reading, ...]:
    """Answers at other times for each prompt."""
    times = (("Before PPO",), ("Before PPO", "After update 9"))
    return tuple(
        Reading(
            title=str(number),
            prompt="say",
            answers=tuple(Answer(title=time, pieces=(("same", "yes"),)) for time in answered),
        )
        for number, answered in enumerate(times)
    )


def training_document(done: int) -> Document:
    """A training that others named and whose models wrote the samples."""
    curve = Curve(
        points=((1.0, 0.5), (2.0, float(done))),
        healthy=(0.0, 10.0),
        marks=(2.0,),
        spread=((1.0, 0.25, 0.75),),
    )
    chart = Chart(title=f"KL {HOSTILE}", caption=HOSTILE, data=curve)
    answer = Answer(title="PPO", pieces=(("same", f"It says {HOSTILE}"),))
    return Document(
        subject="Run",
        verdict="The run is not finished",
        tone="warning",
        reasons=("Nothing is decided yet.",),
        sections=(
            Section(
                title="How far is it?",
                progress=ShownProgress(phase=HOSTILE, done=done, total=64, details=HOSTILE),
            ),
            Section(
                title="Curves and samples",
                text=(f"A warning about {HOSTILE}",),
                charts=(chart,) * 4,
                readings=(Reading(title="1", prompt=HOSTILE, answers=(answer,), notes=("1",)),),
                parts=(Section(title="Answers", text=("Two.",), readings=changed_answers()),),
                commands=(("Repeat this run", f"run '{HOSTILE}'"),),
            ),
        ),
    )


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The cards of a run: its reward model and its policy are refused, and nothing is certain."""
    folder = tmp_path_factory.mktemp("cards")
    report = replace(reward_report(quoted=HOSTILE), fit=False, reasons=[f"It likes {HOSTILE}"])
    evaluation = evaluation_result(judge=f"python:{HOSTILE}", champion=2)
    evaluation = replace(evaluation, conclusive=False, reasons=[f"The judge said {HOSTILE}"])
    refused = decision("refused", reasons=(f"The judge said {HOSTILE}",))
    registered = register(refused, evaluation, folder)
    trainings = (training_document(12), training_document(64))
    records = (validated(report, folder), registered, PromotionConfig(), RUN, trainings)
    (folder / "records.pickle").write_bytes(pickle.dumps(records))
    (folder / "flow.py").write_text(FLOW)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'flows'}",
        "METAFLOW_USER": "tester",
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "flow.py", "--no-pylint", "run"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept = folder / ".metaflow" / "mf.cards"
    steps = {"reward": "start", "evaluation": "evaluate", "promotion": "register"}
    (reward, evaluation, decided) = (
        card for step in steps.values() for card in kept.glob(f"**/{step}/**/*.html")
    )
    (trained,) = kept.glob("**/train/**/*.html")
    found = dict(zip(steps, (reward, evaluation, decided), strict=True))
    return found | {"running": folder / "running.html", "trained": trained}


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluation_result()


@pytest.fixture(scope="module")
def rematch() -> Evaluation:
    """An evaluation that compares with a champion as well."""
    return evaluation_result(champion=2)


def test_a_card_begins_with_the_verdict_and_why(cards: dict[str, Path]):
    verdict, why, *_ = components(cards["reward"])
    assert verdict["value"] == "Refused"
    assert verdict["theme"] == "danger"
    good = "Good for this policy: what PPO gains from this model, the judge sees as well."
    assert why["data"] == [[f"It likes {HOSTILE}"], [good]]
    verdict, why, *_ = components(cards["evaluation"])
    assert verdict["value"] == "Inconclusive"
    assert why["data"][1] == [f"The judge said {HOSTILE}"]
    verdict, why, *_ = components(cards["promotion"])
    assert verdict["value"] == "Refused"
    assert why["data"] == [[f"The judge said {HOSTILE}"]]


def charts_in(part: Any) -> list[str]:
    """Titles of the charts in a part of a card, and in the cells of its tables."""
    if isinstance(part, dict):
        if part.get("type") == "vegaChart":
            return [part["spec"]["title"]["text"]]
        part = part.get("data")
    return [title for one in part for title in charts_in(one)] if isinstance(part, list) else []


def test_a_card_shows_its_charts(cards: dict[str, Path]):
    assert charts_in(components(cards["reward"])) == [
        "Accuracy by margin",
        "Accuracy by confidence",
        "Samples by score",
        "Best of k samples",
    ]
    assert charts_in(components(cards["evaluation"])) == [
        "Pairs won",
        "Wins against SFT by KL from SFT",
    ]


def test_the_card_of_a_training_shows_it_before_the_step_ends(cards: dict[str, Path]):
    for name, done in (("running", 12), ("trained", 64)):
        parts = components(cards[name])
        assert parts[0]["value"] == "The run is not finished"
        (bar,) = [part for part in parts if part["type"] == "progressBar"]
        assert (bar["value"], bar["max"], bar["label"]) == (done, 64, HOSTILE)
        tables = [part["data"] for part in parts if part["type"] == "table"]
        (charts,) = [rows for rows in tables if isinstance(rows[0][0], dict)]
        assert [len(row) for row in charts] == [2, 2]
        spec = charts[0][0]["spec"]
        area, around, line, warned = (layer["data"]["values"] for layer in spec["layer"])
        # Metaflow draws a chart in a table without a width as an empty one.
        assert spec["width"] > 300
        assert area == [{"low": 0.0, "high": 10.0}]
        assert around == [{"x": 1.0, "low": 0.25, "high": 0.75}]
        assert line == [{"x": 1.0, "y": 0.5}, {"x": 2.0, "y": float(done)}]
        assert warned == [{"x": 2.0}]
        assert [["1", HOSTILE, f"It says {HOSTILE}", "1"]] in tables
        assert [
            ["0", "say", "Before PPO: yes", "", ""],
            ["1", "say", "Before PPO: yes", "After update 9: yes", ""],
        ] in tables
        assert [[HOSTILE]] in tables
        assert [["Repeat this run", f"run '{HOSTILE}'"]] in tables


def test_a_card_is_written_every_two_minutes_and_its_data_after_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """In a long training, Metaflow starts two processes in two minutes."""
    now, written = 1000.0, []

    class Card(dict[str, Any]):
        """Notes when Metaflow would start a process: `new` has the whole card, `data` its data."""

        is_new = False

        def __setitem__(self, name: str, parts: list[Any]) -> None:
            assert name == "training" and parts
            self.is_new = True

        def __getitem__(self, name: str) -> "Card":
            return self

        def refresh(self) -> None:
            written.append((now - 1000.0, "new" if self.is_new else "data"))
            self.is_new = False

    monkeypatch.setattr("pipeline.reports.live.live_card.time.monotonic", lambda: now)
    shown = LiveCard(Card())
    for _ in range(37):
        shown.show(training_document(12))
        now += 10.0
    expected = [(0, "new"), (120, "new"), (130, "data"), (240, "new"), (250, "data"), (360, "new")]
    assert written == expected


def test_markdown_gets_headings_in_our_words_only(cards: dict[str, Path]):
    for card in cards.values():
        headings = [part["source"] for part in components(card) if part["type"] == "markdown"]
        assert len(headings) > 1
        for heading in headings:
            assert re.fullmatch(r"## [A-Za-z,:?' ()-]+", heading)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("name", ["reward", "evaluation", "promotion", "running"])
def test_what_others_wrote_is_inert_in_a_card(name: str, cards: dict[str, Path], tmp_path: Path):
    elements = Elements(rendered(cards[name], tmp_path))
    assert_inert(elements)
    verdicts = {"Refused", "Inconclusive", "The run is not finished"}
    assert verdicts & {text.strip() for text in elements.texts}
    if name == "running":
        assert elements.tags.count("canvas") + elements.tags.count("svg") >= 4


def quoting_page() -> str:
    report = replace(reward_report(quoted=HOSTILE), fit=False, reasons=[f"It likes {HOSTILE}"])
    return document_page(reward_document(report))


def test_what_others_wrote_is_escaped_in_the_page():
    elements = Elements(quoting_page())
    assert_inert(elements)
    assert "script" not in elements.tags


def test_a_mask_in_a_page_removes_no_tag():
    text = "-----BEGIN PRIVATE KEY-----"
    reasons = (text, "Authorization: Bearer abcdefghij", "the end")
    document = Document(subject="", verdict="", tone="good", reasons=reasons, sections=())
    page = document_page(document)
    rates = NamedRates(rates={text: (0.5, 0.4, 0.6)})
    chart = draw_chart(Chart(title=reasons[1], caption="caption", data=rates))
    assert "abcdefghij" not in chart and "PRIVATE" not in chart
    items = re.findall("<li>(.*?)</li>", page)
    assert items == ["(hidden)", "Authorization: Bearer (hidden)", "the end"]
    assert page.rstrip().endswith("</html>")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_what_others_wrote_is_inert_in_the_page(tmp_path: Path):
    page = tmp_path / "report.html"
    page.write_text(quoting_page())
    assert_inert(Elements(rendered(page, tmp_path / "profile")))


def test_the_page_stands_alone_and_allows_no_scripts():
    report = reward_report()
    elements = Elements(document_page(reward_document(report)))
    assert not [*elements.addresses()]
    assert elements.tags.count("svg") == 4
    assert any(value.startswith("default-src 'none'; ") for _, value in elements.attributes)


def test_the_page_and_the_card_say_the_same(tmp_path: Path):
    report = reward_report()
    said = " ".join(Elements(document_page(reward_document(report))).texts)
    for section in reward_document(report).sections:
        for text in (
            section.title,
            *section.headers,
            *(cell for row in section.rows for cell in row),
        ):
            assert text in said
    card = reward_model_card(validated(report, tmp_path), RUN)
    tables = [part.render()["data"] for part in card if hasattr(part, "_data")]
    of_text = [rows for rows in tables if all(isinstance(cell, str) for cell in rows[0])]
    rows = [[list(row) for row in section.rows] for section in reward_document(report).sections]
    assert of_text[1:] == rows


@pytest.mark.parametrize(
    ("fit", "accepted", "verdict", "tone"),
    [
        (True, False, "Fit", "success"),
        (False, False, "Refused", "danger"),
        (False, True, "Refused, and accepted by hand", "warning"),
    ],
)
def test_the_verdict_on_a_reward_model(fit: bool, accepted: bool, verdict: str, tone: str):
    reasons = [] if fit else ["It counts characters."]
    changes = {"fit": fit, "accepted_by_hand": accepted, "reasons": reasons}
    document = reward_document(replace(reward_report(), **changes))
    assert (document.verdict, document.tone) == (verdict, tone)
    assert document.reasons[0] == (reasons or ["It keeps every limit of the gate."])[0]


@pytest.mark.parametrize(
    ("best", "low", "usefulness"),
    [(0.52, 0.5, "Useless"), (0.59, 0.51, "Usable"), (0.6, 0.51, "Good")],
)
def test_what_follows_from_the_choices_among_samples(best: float, low: float, usefulness: str):
    changes = {"on_policy.best_of": {"2": best, "4": best}, "on_policy.low": low}
    document = reward_document(changed(reward_report(), changes | {"warnings": ["Few pairs."]}))
    assert document.reasons[1].startswith(f"{usefulness} for this policy: ")
    assert document.reasons[2] == "Few pairs."
    assert document.sections[0].title == "Choices among the policy's own answers"


@pytest.mark.parametrize(
    ("low", "high", "conclusive", "verdict", "tone"),
    [
        (0.51, 0.6, True, "Better", "success"),
        (0.5, 0.6, True, "No difference shown", "warning"),
        (0.4, 0.5, True, "No difference shown", "warning"),
        (0.4, 0.49, True, "Worse", "danger"),
        (0.51, 0.6, False, "Inconclusive", "warning"),
    ],
)
def test_the_verdict_on_a_policy(
    low: float, high: float, conclusive: bool, verdict: str, tone: str, evaluation: Evaluation
):
    direct = {"win_rate.ppo_vs_sft.low": low, "win_rate.ppo_vs_sft.high": high}
    document = evaluation_document(changed(evaluation, direct | {"conclusive": conclusive}))
    assert (document.verdict, document.tone) == (verdict, tone)


def test_the_accuracy_stands_beside_the_baselines_and_the_published_ones():
    measured = {"accuracy": 0.7025, "low": 0.66, "high": 0.74, "n": 570}
    report = changed(reward_report(), {f"accuracy.{name}": measured[name] for name in measured})
    document = reward_document(report)
    title = "Accuracy on held-out preferences"
    assert row_of(document, title, "This model") == ("This model", "70.2%", "66.0% .. 74.0%", "570")
    assert row_of(document, title, "A tossed coin")[1] == "50.0%"
    assert row_of(document, title, "Published for TL;DR, 2.8B")[1] == "66.9%"
    longer = report.accuracy.longer.accuracy
    assert row_of(document, title, "Always the longer response")[1] == f"{longer:.1%}"


def test_what_was_not_measured_is_not_shown(evaluation: Evaluation):
    report = reward_report()
    before = [section.title for section in reward_document(report).sections]
    none = {"by_category": {}, "people": None, "ties.n": 0, "ties.identical": 0}
    report = changed(report, {f"accuracy.{name}": value for name, value in none.items()})
    after = [section.title for section in reward_document(report).sections]
    gone = {"Accuracy by category", "Pairs between which people see no difference"}
    assert set(before) - set(after) == gone

    before = [section.title for section in evaluation_document(evaluation).sections]
    without = replace(evaluation, people=None)
    after = [section.title for section in evaluation_document(without).sections]
    assert set(before) - set(after) == {"The judge and people on the same pairs", ALTERNATIVE}
    without = replace(evaluation, baselines=None)
    after = [section.title for section in evaluation_document(without).sections]
    assert set(before) - set(after) == {WITHOUT_PPO}


def test_what_could_not_be_said_is_said_so():
    unknown = (
        "contract.end_of_text samples.references lengths.correlation lengths.shorter "
        "calibration.temperature contract.batch.largest contract.batch.share"
    )
    report = changed(reward_report(), dict.fromkeys(unknown.split()))
    page = document_page(reward_document(report))
    assert page.count("not measurable") == 2
    title = "Contract: the same text has the same score, and every text has one"
    assert (
        row_of(reward_document(report), title, "Batches of one text, or of many")[1] == "not finite"
    )
    assert "None" not in page


def test_the_judges_of_an_ensemble_are_shown_one_by_one(evaluation: Evaluation):
    agreement = EnsembleAgreement(
        outcomes={},
        rates={"one": 0.6, "other": None},
        pairs=[PairAgreement(judges=("one", "other"), n=0, share=None, kappa=None)],
        fleiss_kappa=0.25,
        n=10,
    )
    direct = {"win_rate.ppo_vs_sft.agreement": agreement}
    document = evaluation_document(changed(evaluation, direct))
    (section,) = [part for part in document.sections if part.title == "The judges of the ensemble"]
    assert section.rows == (
        ("PPO against SFT", "one", "60.0%", "", ""),
        ("PPO against SFT", "other", "none", "", ""),
        ("PPO against SFT", "one and other", "", "none", "none"),
        ("PPO against SFT", "all (Fleiss)", "", "", "0.25"),
    )


def test_a_canary_that_the_judge_fell_for_is_named(evaluation: Evaluation):
    found = {
        "empty": CanaryKind(asked=8, won=8, invalid=0, fell=True),
        "same": CanaryKind(asked=8, won=0, invalid=8, fell=False),
    }
    document = evaluation_document(changed(evaluation, {"canaries.kinds": found}))
    title = "Canaries: answers that a sound judge does not choose"
    assert row_of(document, title, "empty") == ("empty", "8", "8", "0", "fell for it")
    assert row_of(document, title, "same") == ("same", "0", "8", "8", "was not tested")


def test_wins_by_length_are_shown_for_each_contest(evaluation: Evaluation):
    parts = [LengthBin(ratio="<0.5", rate=0.25, n=4, judge="rule")]
    win_rates = {
        name: replace(rate, by_length_ratio=parts if name == "ppo_vs_sft" else [])
        for name, rate in evaluation.win_rate.items()
    }
    document = evaluation_document(replace(evaluation, win_rate=win_rates))
    title = "Wins by the length of the answer divided by the length of its opponent"
    assert row_of(document, title, "<0.5") == ("<0.5", "", "", "25.0% of 4")
    assert row_of(document, title, ">2") == (">2", "", "", "")


def test_an_evaluation_has_the_same_components_as_its_document(
    evaluation: Evaluation, tmp_path: Path
):
    document = evaluation_document(evaluation)
    charts = sum(bool(section.charts) for section in document.sections)
    texts = sum(len(section.text) for section in document.sections)
    # The verdict and the reasons; a heading and a table a section; texts; the tables of charts.
    card = evaluation_card(evaluated(evaluation, tmp_path), ["Loss spike: it is 9."], RUN)
    assert len(card) == 2 + 2 * len(document.sections) + texts + charts
    warned = evaluation_document(evaluation, ["Loss spike: it is 9."])
    assert warned.reasons == (*document.reasons, "Warning: Loss spike: it is 9.")


def test_the_contest_against_the_champion_is_shown_everywhere_where_there_is_one(
    evaluation: Evaluation, rematch: Evaluation
):
    contest = "PPO against the champion"
    document = evaluation_document(rematch)
    for title in ("Win rates", "Without the advantage of length"):
        assert row_of(document, title, contest)
    (ratios,) = [part for part in document.sections if part.title.startswith("Wins by the length")]
    assert ratios.headers[-1] == contest
    assert row_of(document, "The answers", "Champion")[1] == ""
    assert contest not in repr(evaluation_document(evaluation))
    assert "Champion" not in repr(evaluation_document(evaluation))


def test_length_and_repetition_are_shown_for_everybody(evaluation: Evaluation):
    document = evaluation_document(evaluation)
    assert row_of(document, "The answers", "PPO") == ("PPO", "12.30", "98.5%", "40.5", "3.4%")
    assert row_of(document, "The answers", "SFT") == ("SFT", "0", "100.0%", "31", "1.2%")
    references = ("References", "", "100.0%", "31", "1.2%")
    assert row_of(document, "The answers", "References") == references


def test_a_win_rate_at_equal_length_is_shown_only_where_it_was_measured(
    evaluation: Evaluation,
):
    measured = evaluation.win_rate["ppo_vs_sft"]
    shown = f"{measured.length_controlled:.1%}"
    none = replace(measured, length_controlled=None, equal_length_pairs=0)
    without = changed(evaluation, {"win_rate.ppo_vs_sft": none})
    title = "Without the advantage of length"
    row = row_of(evaluation_document(evaluation), title, "PPO against SFT")
    assert row[2:] == (shown, f"{measured.equal_length_pairs} of {measured.n}")
    row = row_of(evaluation_document(without), title, "PPO against SFT")
    assert row[2:] == (f"not measurable, 0 of {measured.n}", f"0 of {measured.n}")
    terminal = " ".join(lines(render_summary(summary(win_rate=without.win_rate))))
    assert "not measurable" in terminal and f"0 of {measured.n}" in terminal
    assert shown in render_summary(summary(win_rate=evaluation.win_rate))
    name = "win_rate/ppo_vs_sft/length_controlled"
    assert name in evaluation_numbers(evaluation) and name not in evaluation_numbers(without)


def test_colors_are_for_terminals_only(evaluation: Evaluation, monkeypatch):
    given = summary(win_rate=evaluation.win_rate)
    plain = render_summary(given)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert render_summary(given) == plain


def test_zeros_are_shown_as_0_and_differences_of_rates_in_points(evaluation: Evaluation):
    kl = {"sft": -2.7e-9, "ppo": 1.5}
    document = evaluation_document(replace(evaluation, kl=kl))
    assert row_of(document, "The answers", "SFT")[1] == "0"
    objective = {name: Change(first=-1e-9, last=-0.0) for name in summary().objective}
    improvement = replace(evaluation.improvement, difference=-1e-9, low=-0.052, high=0.0525)
    given = summary(objective=objective, kl=kl, improvement=improvement)
    shown = lines(render_summary(given))
    assert any(", kl 0 -> 0," in line for line in shown)
    gained = "+0.0 points against the references, 95 % interval -5.2 .. +5.2"
    assert any(line.endswith(gained) for line in shown)
    (section,) = [
        part
        for part in evaluation_document(replace(evaluation, improvement=improvement)).sections
        if part.title.startswith("Wins against the references")
    ]
    assert section.headers[1] == "95 % interval, points"
    assert section.rows[0][:2] == ("+0.0 points", "-5.2 .. +5.2")


def test_without_references_and_with_a_trained_judge_the_reports_say_so():
    judge = TrainedJudge(path="cache/judge-1", accuracy=0.7, low=0.6, high=0.79, n=90)
    bare = {"trained_judge": judge, "references": False}
    evaluation = evaluation_result(**bare)
    weaker, lonely = evaluation.notes
    assert weaker == (
        "The judge is a reward model that the run trained with another seed, on preference pairs "
        "that were kept out of the training of PPO's reward model. It may share errors with the "
        "reward model that PPO used, so this is weaker evidence than people or a judge of another "
        "kind. The judge is right in 70.0% of 90 held-out pairs, "
        "95 % interval 60.0% .. 79.0%."
    )
    assert lonely.startswith("There are no references, so the policies are compared only with each")

    document = evaluation_document(evaluation)
    assert document.reasons[1:3] == (weaker, lonely)
    (rates,) = [section for section in document.sections if section.title == "Win rates"]
    assert [row[0] for row in rates.rows] == ["PPO against SFT"]
    assert not any("references" in section.title for section in document.sections)
    assert row_of(document, "Canaries: answers that a sound judge does not choose", "empty")

    numbers = evaluation_numbers(evaluation)
    assert numbers["judge/accuracy"] == 0.7 and numbers["judge/low"] == 0.6
    assert not any("improvement" in name or "reference" in name for name in numbers)

    decision_on_it = decided("promoted", evaluation, champion=None)
    assert decision_on_it.reasons == ("It wins.", weaker, lonely)
    assert row_of(decision_on_it, "Figures and limits", "PPO against the references")[1:] == (
        "there are no references",
        "not applied",
    )

    shown = " ".join(lines(render_summary(summary(evaluation_result(champion=2, **bare)))))
    assert f"Note: {weaker} Note: {lonely}" in shown
    assert "PPO gained on SFT" not in shown and "against the references" not in shown


def test_a_divergence_that_was_not_measured_is_said_so(evaluation: Evaluation):
    greedy = replace(evaluation, kl={"sft": None, "ppo": None})
    assert row_of(evaluation_document(greedy), "The answers", "PPO")[1] == "none"
    numbers = evaluation_numbers(greedy)
    assert not any(name.startswith("kl/") for name in numbers)


def test_the_metrics_of_an_evaluation_are_grouped_and_are_numbers(rematch: Evaluation):
    numbers = evaluation_numbers(rematch)
    assert {name.partition("/")[0] for name in numbers} == set(
        "win_rate improvement baseline kl distinct length repetition guards evaluation".split()
    )
    assert numbers["baseline/best_of_4/gain"] == -0.06
    assert numbers["length/ppo"] == 40.5
    assert numbers["repetition/champion"] == 0.012
    assert numbers["win_rate/ppo_vs_champion/low"] > 0.5
    assert all(type(value) is float for value in numbers.values())


def decided(
    action: str,
    evaluation: Evaluation,
    *,
    fit: bool | None = True,
    max_kl: float = PromotionConfig.max_kl,
    **changes: Any,
) -> Document:
    """The document of a decision on version 3."""
    registered = RegisteredPolicy(
        model={},
        promotion=decision(action, **changes),
        evaluation=EvaluatedPolicy(champion=evaluation.champion, kl=12.3, folder="evaluation"),
        kl=12.3,
        alpha=0.0001,
        earlier_decisions=4,
        previous=None,
    )
    limits = PromotionConfig(max_kl=max_kl)
    return promotion_document(registered, evaluation, limits, reward_model_fit=fit)


def test_the_card_of_a_decision_says_it_and_why(rematch: Evaluation):
    promoted = decided("promoted", rematch)
    assert (promoted.verdict, promoted.tone) == ("Promoted", "success")
    assert row_of(promoted, "The decision", "3") == ("3", "champion", "version 2")
    earlier = "Earlier decisions on these evaluation data"
    assert row_of(promoted, "Figures and limits", earlier)[1] == "4"
    refused = decided("refused", rematch, reasons=("It loses.", "It repeats."))
    assert (refused.verdict, refused.tone) == ("Refused", "danger")
    assert refused.reasons == ("It loses.", "It repeats.")
    stays = "refused, and version 2 stays champion"
    assert row_of(refused, "The decision", "3") == ("3", stays, "version 2")


def test_the_card_of_a_first_version_names_no_champion(evaluation: Evaluation):
    first = decided("refused", evaluation, champion=None)
    nobody = "refused, and there is no champion"
    assert row_of(first, "The decision", "3") == ("3", nobody, "there was none")
    assert row_of(first, "Figures and limits", "PPO against SFT")


def test_the_card_of_a_decision_says_what_had_no_limit_and_what_was_not_used(rematch: Evaluation):
    document = decided("promoted", rematch, fit=None, max_kl=math.inf)
    title = "Figures and limits"
    assert row_of(document, title, "KL of an answer from SFT, nats")[2] == "no limit"
    assert row_of(document, title, "Reward model")[1] == "not used"
    by_hand = decided("promoted", rematch, fit=False)
    assert row_of(by_hand, title, "Reward model")[1] == "accepted by hand"


def test_the_card_of_a_decision_has_every_figure_beside_its_limit(rematch: Evaluation):
    document = decided("promoted", rematch)
    rows = {row[0]: row[1:] for row in document.sections[1].rows}
    rate, references = (rematch.win_rate[name] for name in ("ppo_vs_champion", "ppo_vs_reference"))

    def shown(of: ContestResult) -> str:
        return f"{of.rate:.1%}, {of.low:.1%} .. {of.high:.1%}, evidence {as_evidence(of)}"

    # The alpha of the tests is 0.001, but that of the decision is 0.0001.
    limit = "above 50.0%, by evidence of 10,000 : 1"
    guard = (
        "99.0%, +1.0 points, -2.0 .. +4.0",
        "no loss is shown, or the loss is at most 5 points",
    )
    assert rows == {
        "PPO against the champion": (shown(rate), limit),
        "PPO against the references": (shown(references), limit),
        "KL of an answer from SFT, nats": ("12.3", "at most 20"),
        "Words of an answer, and of its opponent": ("40.5 and 31", "at most 2 times the other"),
        "People's labels of these pairs": (
            "too few labels, so a bias of the judge is not measured",
            "no limit",
        ),
        "Repeated 3-grams of words": ("3.4%", "at most 30.0%"),
        "Guard stops: answers that stop within response_length": guard,
        "Guard polite": guard,
        "Evaluation": ("conclusive", "conclusive"),
        "Reward model": ("fit", "fit"),
        "Earlier decisions on these evaluation data": ("4", "no limit"),
    }


def test_the_card_of_a_decision_has_the_components_of_its_document(
    evaluation: Evaluation, tmp_path: Path
):
    registered = register(decision(), evaluation, tmp_path)
    validation = validated(reward_report(), tmp_path)
    card = promotion_card(registered, validation, PromotionConfig(), RUN)
    assert len(card) == 2 + 2 * len(decided("promoted", evaluation).sections)


def lines(text: str) -> list[str]:
    """The lines of a table in the terminal, without its borders."""
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


def test_each_guard_is_in_the_terminal_the_page_and_the_card_of_the_evaluation():
    refused = guard_result(policy=0.1, difference=-0.8, low=-0.9, high=-0.7, passed=False)
    evaluation = replace(evaluation_result(), guards={"stops": guard_result(), "polite": refused})
    results = {
        "stops": ("99.0%", "98.0%", "+1.0 points", "-2.0 .. +4.0", "5 points", "passed"),
        "polite": ("10.0%", "98.0%", "-80.0 points", "-90.0 .. -70.0", "5 points", "refused"),
    }
    shown = lines(render_summary(summary(evaluation)))
    assert "Guards passed: stops" in shown
    (section,) = [
        one for one in evaluation_document(evaluation).sections if one.title.startswith("Guards")
    ]
    rows = {row[0].partition(":")[0]: row[1:] for row in section.rows}
    for name, cells in results.items():
        assert rows[name] == (*cells, "200")
    # A guard that passed has no numbers in the terminal.
    assert " ".join(("polite", *results["polite"])) in shown
    assert not [
        one
        for one in evaluation_document(replace(evaluation, guards={})).sections
        if one.title.startswith("Guards")
    ]
    assert "Guards" not in render_summary(summary(replace(evaluation, guards={})))


def test_whether_ppo_was_worth_it_is_in_the_terminal_the_page_and_one_sentence():
    evaluation = evaluation_result()
    rows = {
        "SFT": ("50.0%", "", "0", "", ""),
        "SFT, greedy": ("58.3%", "48.3% .. 68.3%", "6.25", "+12.5 points", "+1.0 .. +24.0"),
        "SFT, best of 4": (
            *("77.1%", "67.1% .. 87.1%", "0.64"),
            *("-6.0 points", "-20.0 .. +8.0"),
        ),
        "PPO": ("70.8%", "60.0% .. 80.0%", "12.30", "", ""),
    }
    document, shown = evaluation_document(evaluation), lines(render_summary(summary(evaluation)))
    for name, cells in rows.items():
        assert row_of(document, WITHOUT_PPO, name) == (name, *cells)
    baselines = evaluation.baselines
    assert baselines and baselines.ppo
    said = (
        f"On {baselines.ppo.n} prompts, PPO wins 70.8% against SFT; the best of 4 samples by the "
        "reward model wins 77.1% without any training. "
    )
    unclear = "Which of the two is better is not clear: -6.0 points, 95 % interval -20.0 .. +8.0."
    assert said + unclear in document.reasons
    assert (
        "Greedy decoding of SFT wins 58.3%, and PPO 70.8%. PPO is better: +12.5 points, 95 % "
        "interval +1.0 .. +24.0."
    ) in document.reasons
    assert unclear.split()[-1] in " ".join(shown)
    for low, high, words in ((0.01, 0.2, "PPO is better: "), (-0.2, -0.01, "PPO is worse: ")):
        gain = {
            "baselines.found.best_of_4.gain.low": low,
            "baselines.found.best_of_4.gain.high": high,
        }
        assert said + words in " ".join(evaluation_document(changed(evaluation, gain)).reasons)
    nothing = {"win_rate": None, "gain": None, "why": "The limit is spent."}
    one = changed(baselines.found["greedy"], nothing)
    spent = replace(
        evaluation,
        baselines=replace(baselines, found={"greedy": one, "best_of_4": one}, ppo=None),
    )
    document = evaluation_document(spent)
    assert row_of(document, WITHOUT_PPO, "SFT, greedy")[1:3] == ("not measured", "")
    assert "PPO was not compared with what SFT reaches without PPO: The limit is spent." in (
        document.reasons
    )
    assert not next(one for one in document.sections if one.title == WITHOUT_PPO).charts


def test_whether_the_judge_may_stand_for_a_person_is_said_beside_kappa(evaluation: Evaluation):
    document = evaluation_document(evaluation)
    assert row_of(document, ALTERNATIVE, "eve")[1:] == (
        *("40", "90.0%", "100.0%"),
        *("0.279", "not replaceable"),
    )
    assert (
        "The judge may stand for a person: it can replace 2 of 3 people (alternative annotator "
        "test, cost 0.15)." in document.reasons
    )
    few = {
        "people.alternative": AnnotatorTest(
            people={}, cost=0.15, winning_rate=None, passed=None, why="Two people are few."
        )
    }
    document = evaluation_document(changed(evaluation, few))
    assert ALTERNATIVE not in [section.title for section in document.sections]
    assert any("was not measured: Two people are few." in reason for reason in document.reasons)


def places(made: Decision, model: str = "rlhf-policy") -> list[str]:
    return render_places(
        page="Page of the run: x", run_id="7", mlflow="m", model=model, decision=made
    ).splitlines()


def test_the_terminal_says_what_became_of_the_version():
    assert any(line.startswith("PPO against the champion") for line in lines(summary_text()))
    assert places(decision()) == [
        "Page of the run: x",
        "Card: python flows/rlhf.py card view 7/evaluate_win_rate",
        "MLflow: m",
        "Policy: models:/rlhf-policy/3, champion",
        "Next: mlflow models serve -m models:/rlhf-policy@champion --env-manager local",
    ]
    refused = decision("refused", reasons=("It loses.", "It repeats " + "itself " * 30))
    shown = lines(summary_text(promotion=refused))
    assert "It loses." in shown
    assert " ".join(shown).count("itself") == 30
    told = places(refused, model="a b")
    assert told[3] == "Policy: models:/a b/3, refused, and version 2 stays champion"
    assert told[4].endswith("to overrule, python flows/registry.py promote 'a b' 3 --reason TEXT")
    nobody = places(decision("refused", champion=None))
    assert nobody[3].endswith("refused, and there is no champion")


def summary_text(**changes: object) -> str:
    return render_summary(summary(**changes))


def test_no_line_of_the_terminal_begins_with_a_space_or_has_more_than_100_columns():
    long = "python:/a/path/of/a/judge/that/is/not/short.py:judge, prompt 3fa91c02 " * 3
    refused = guard_result(policy=0.1, difference=-0.8, low=-0.9, high=-0.7, passed=False)
    evaluation = evaluation_result(judge=long, champion=2)
    direct = replace(evaluation.win_rate["ppo_vs_sft"], length_controlled=None, n=1000)
    evaluation = replace(
        evaluation,
        win_rate={**evaluation.win_rate, "ppo_vs_sft": direct},
        guards={"stops": guard_result(), "a_guard_with_a_long_name": refused},
    )
    text = render_summary(summary(evaluation, warnings=["word " * 50]))
    for line in text.splitlines():
        # Metaflow removes the spaces, and so would shift a row of a table.
        assert line == line.strip() and 0 < len(line) <= 100


def test_the_terminal_repeats_the_warnings_of_the_run():
    warning = "Update 7. Far from reference: objective/kl is 16, above 15 (warn_kl)."
    assert f"Warning: {warning}" in lines(render_summary(summary(warnings=[warning])))
    assert "Warning" not in render_summary(summary())


def test_the_terminal_shows_what_others_wrote_as_it_is():
    name = "[/bold] :smile: [red]x"
    reasons = {"reasons": [f"The judge {name} fell."], "conclusive": False}
    refused = decision("refused", reasons=(f"It lost, says {name}.",))
    given = summary(evaluation_result(judge=name, champion=2), **reasons, promotion=refused)
    shown = lines(render_summary(given))
    assert f"Win rates, judged by {name}" in shown
    assert f"Inconclusive: The judge {name} fell." in shown
    assert f"It lost, says {name}." in shown
