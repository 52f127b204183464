"""The page of a run: its answers to a stranger, in a real browser, and on a run of any size."""

import io
import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.json_lines import write_jsonl
from pipeline.inputs.lineage import DataSet
from pipeline.registry.aliases import VersionNotes
from pipeline.reports.charts import MOST_POINTS, thinned
from pipeline.reports.document import Section
from pipeline.reports.html_page import document_page
from pipeline.reports.live import live_view
from pipeline.reports.live.live_card import LiveCard
from pipeline.reports.live.live_panel import LivePanel
from pipeline.reports.run_page import differences
from pipeline.reports.run_page.answer_sections import (
    MOST_CHARACTERS,
    JudgedPair,
    choose_pairs,
    differing_words,
    watched_section,
)
from pipeline.reports.run_page.facts import RunFacts, curves_of
from pipeline.reports.run_page.run_report import run_report
from pipeline.reports.run_page.training import ppo_section
from pipeline.reports.run_page.write_page import PAGE_FILE, write_failure, write_run_page
from pipeline.results.step_records import RegisteredPolicy, WatchedPrompt
from pipeline.settings.make_settings import make_settings
from pipeline.storage.workspace import Workspace
from pipeline.tracking.journal import Journal
from pipeline.tracking.run_log import RunLog
from pipeline.tracking.tracker import Tracker
from ppo_core.errors import ModelError
from ppo_core.io.progress_bar import PROGRESS, progress
from ppo_core.io.validation import read_record
from ppo_core.reporting.metrics_file import COMPLETIONS, NEWEST_SAMPLES_FILE
from tests.helpers.inputs.sample_reports import (
    HOSTILE,
    decision,
    evaluated,
    evaluation_result,
    reward_report,
    run_cost,
)
from tests.helpers.servers.browser import CHROMEDRIVER, CHROMIUM, Browser, chromium

UPDATES = 15_625
"""Updates of a run of a million episodes in batches of 64."""

WARNINGS = [
    "Update 7. Far from reference: objective/kl is 16, above 15 (warn_kl). Raise kl_coef.",
    "Update 9. Falling reward: drop of objective/rlhf_reward is 3, above 1 (noise).",
]

QUESTIONS = {
    "did it get better, by how much": "Did it get better, and by how much?",
    "can I trust the judge": "Can I trust the judge?",
    "what did it learn to say": "What did it learn to say? Prompts",
    "did it cheat": "Did it cheat? Length, repetition, guards",
    "why refused": "Why was it refused? Measured values and limits",
    "which data": "Which data, code and models?",
    "what did it cost": "What did it cost?",
    "how do I load or undo it": "How do I load the version, undo a promotion, label or repeat?",
}
"""What a stranger asks, and the heading of the answer."""

LOOK = """
const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = color => {
  const [r, g, b] = channels(color).map(one => one / 255).map(
    one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = one => {
  const color = getComputedStyle(one).backgroundColor;
  return color.endsWith(", 0)") ? behind(one.parentElement) : color;
};
const contrast = one => {
  const style = getComputedStyle(one);
  const sides = [one instanceof SVGElement ? style.fill : style.color, behind(one)].map(light);
  return (Math.max(...sides) + 0.05) / (Math.min(...sides) + 0.05);
};
const own = one => [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
const shown = [...document.body.querySelectorAll("*")].filter(own);
const all = selector => [...document.querySelectorAll(selector)];
return {
  title: document.title,
  text: document.body.innerText,
  page: behind(document.body),
  headings: all("h2").map(one => one.textContent),
  requests: performance.getEntriesByType("resource").map(one => one.name),
  wide: document.documentElement.scrollWidth - innerWidth,
  scripts: all("script").length,
  empty_tables: all("table").filter(one => one.rows.length < 2).length,
  tables: all("table").length,
  empty_charts: all("svg").filter(one => !one.querySelector(".line, .dot")).length,
  charts: all("svg").length,
  marks: all("svg .warned").length,
  healthy: all("svg .healthy").length,
  changed: all("ins").length && all("del").length,
  readings: all(".answers").length,
  worst: shown.map(one => [contrast(one), one.outerHTML.slice(0, 90)])
    .sort((a, b) => a[0] - b[0])[0],
  links: all("a").filter(one => !document.querySelector(one.getAttribute("href"))).length,
};
"""
"""What a page shows: contrast of its texts, width, elements, and what it loaded."""


def judged(number: int, first: float) -> dict[str, Any]:
    """A judged pair; the judge gives this probability to PPO's answer, in both orders."""
    verdict = {"winner": "first" if first > 0.5 else "second", "probability": first}
    return {
        "contest": "ppo_vs_champion",
        "prompt": f"prompt {number} {HOSTILE}",
        "candidate": f"mine {number} {HOSTILE}",
        "opponent": f"theirs {number}",
        "outcome": verdict["winner"],
        "straight": verdict | {"reason": f"It says {HOSTILE}"},
        "swapped": verdict,
    }


def training(journal: Journal, updates: int) -> None:
    """Metrics of SFT and PPO as the journal of a run has them."""
    names = (
        "objective/scores objective/kl policy/entropy_avg val/ratio policy/clipfrac_avg "
        "loss/value_avg val/explained_variance val/response_length objective/scores_p10 "
        "objective/scores_p90"
    ).split()
    with journal.path.open("a") as file:
        for update in range(1, updates + 1):
            values = dict.fromkeys(names, update / updates)
            values |= {"objective/rlhf_reward": 30.0 if update == 99 else 1.0}
            values |= {"episode": 64.0 * update, "val/num_eos_tokens": 32.0}
            values["loss/policy_avg"] = (math.nan, math.inf, 1e308, 2.0)[update % 4]
            values["eval/scores"] = math.nan
            values["sft/loss"] = 1 / update
            entry = {"time": 1, "kind": "metrics", "run": "parent", "step": update}
            file.write(json.dumps(entry | {"values": values}) + "\n")


def facts_of(folder: Path, updates: int, samples: int = 30) -> RunFacts:
    """A run whose policy is refused, with hostile text wherever others wrote."""
    tracking = {"parent": "parent", "load_policy": "sft", "train_policy": "train"}
    data = DataSet(name="prompts", source=f"{HOSTILE}.jsonl", digest="12", rows=9)
    run = FlowRun(
        id="RLHF/1",
        workspace=Workspace(str(folder)),
        tracking=tracking,
        origin={"git_commit": "abc", "data/prompts": "12", "half a character": "\udcff"},
        data=[data],
    )
    journal = Journal(run.folder)
    training(journal, updates)
    evaluation = evaluation_result(judge=f"python:{HOSTILE}", champion=2)
    stored = evaluated(evaluation, run.folder)
    answer = {"prompt": f"say {HOSTILE}", "reference": "w", "sft": "a b c", "ppo": "a d c"}
    answers = [{**answer, "champion": HOSTILE * number} for number in range(samples)]
    write_jsonl(stored.samples, answers)
    write_jsonl(stored.judgements, [judged(n, n / samples) for n in range(samples)])
    return RunFacts(
        run=run,
        settings=make_settings({}, {}),
        curves=curves_of(run, journal),
        reward_model=reward_report(quoted=HOSTILE),
        warnings=[*WARNINGS, f"Update 11. {HOSTILE}"],
        evaluation=evaluation,
        registered=RegisteredPolicy(
            model={"uri": f"models:/{HOSTILE}/3"},
            promotion=decision("refused", reasons=(f"min_win_rate is missed: {HOSTILE}",)),
            evaluation=stored,
            kl=12.3,
            alpha=0.001,
            earlier_decisions=4,
            previous=1,
        ),
        cost=run_cost(),
        watched=[
            WatchedPrompt(prompt=f"ask {HOSTILE}", answers={0: ("a", 0.5), 9: (HOSTILE, math.inf)})
        ],
        since_champion=Section(title="What changed?", headers=("a",), rows=((HOSTILE,),)),
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> RunFacts:
    return facts_of(tmp_path_factory.mktemp("run"), UPDATES)


@pytest.fixture(scope="module")
def page(facts: RunFacts) -> Path:
    said = write_run_page(facts, RunLog(Journal(facts.run.folder), "parent"))
    path = facts.run.folder / PAGE_FILE
    assert said == f"Page of the run: {path}, and index.html of the run in MLflow"
    assert (
        json.loads((facts.run.folder / "journal.jsonl").read_text().splitlines()[-1])["path"]
        == PAGE_FILE
    )
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (CHROMIUM and CHROMEDRIVER):
        pytest.skip("needs Chromium and its driver")
    with chromium(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_the_page_whole_and_readable(
    browser: Browser, page: Path, width: int, dark: bool
):
    browser.look_as(width, dark=dark)
    browser.open(page.as_uri())
    found = browser.run(LOOK)
    assert browser.complaints() == []
    assert found["requests"] == []
    assert found["scripts"] == 0
    assert found["title"] == "Run RLHF/1 of rlhf-policy"
    assert found["text"].count(HOSTILE) > 100
    assert not [asked for asked in browser.asked if "192.0.2.1" in asked]
    assert found["wide"] <= 0
    assert set(QUESTIONS.values()) <= set(found["headings"])
    assert found["links"] == found["empty_tables"] == found["empty_charts"] == 0
    assert found["tables"] > 20
    assert found["charts"] > 14
    assert found["marks"] == 2
    assert found["healthy"] >= 6
    assert found["changed"]
    assert found["readings"] == 20 + 8 + 1
    assert found["page"] == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert found["worst"][0] >= 4.5, found["worst"]
    assert browser.accessibility_violations() == []


def test_the_top_says_what_was_decided_and_which_rule_failed(page: Path):
    top = re.sub(r"<nav.*", "", page.read_text(), flags=re.DOTALL)
    assert "Version 3 was refused, and production still loads version 2" in top
    assert re.search(r"% of \d+ pairs against the champion, 95 % interval", top)
    assert "Rule that failed: min_win_rate is missed: &lt;script&gt;" in top
    assert "this run did not make: production loads version 1 again" in page.read_text()
    assert "python flows/registry.py rollback rlhf-policy --reason TEXT" in page.read_text()
    assert re.search(
        r"python flows/feedback.py choose \S+/runs/\S+ --policy .+ --labels 200",
        page.read_text(),
    )


def test_a_run_of_a_million_episodes_and_of_long_texts_has_a_small_page(
    facts: RunFacts, page: Path
):
    assert page.stat().st_size < 1_000_000
    text = page.read_text()
    points = re.findall(r'polyline class="line" points="([^"]+)"', text)
    assert len(points) > 9
    assert max(len(line.split()) for line in points) <= MOST_POINTS
    assert re.search(r"\[cut: [\d,]+ more characters\]", text)
    reward = facts.curves["objective/rlhf_reward"]
    assert (99, 30.0) in thinned(reward)
    assert [thinned(reward)[end] for end in (0, -1)] == [reward[end] for end in (0, -1)]
    assert max(map(len, re.findall(r'<div class="text">([^<]*)', text))) < 8 * MOST_CHARACTERS


def test_curves_have_their_healthy_range_their_warnings_and_a_share_of_stops(facts: RunFacts):
    charts = {chart.title: chart.caption for chart in ppo_section(facts).charts}
    assert charts["KL from SFT, nats"].endswith("Healthy: -1 to 15. Warned in update 7.")
    assert charts["Score less the KL penalty"].endswith("Warned in update 9.")
    assert charts["Responses that ended with a stop token"].endswith("from 0.5 to 0.5.")
    clipped = charts["Clipped tokens of the policy"]
    assert clipped.endswith("Healthy: 0 to 0.3. The last value is outside.")
    assert charts["Policy loss"].endswith("from 2 to 2.")
    assert charts["Score of a response"].endswith("Blue area: the middle 80 % of the responses.")
    assert "Blue" not in charts["Tokens of a response"]
    assert "Score of greedy answers to evaluation prompts" not in charts
    assert "Healthy: at most" in charts["Tokens of a response"]


def test_pairs_to_read_are_the_best_worst_closest_and_others_each_once():
    rows = [read_record(judged(number, number / 100), JudgedPair) for number in range(101)]
    chosen = choose_pairs(rows)
    kinds = {kind: [row.strength for of, row in chosen if of == kind] for kind, _ in chosen}
    assert kinds["Best"] == [1, 0.99, 0.98, 0.97, 0.96]
    assert kinds["Worst"] == [0, 0.01, 0.02, 0.03, 0.04]
    assert sorted(kinds["Closest"]) == [0.48, 0.49, 0.5, 0.51, 0.52]
    assert len(kinds["Random"]) == 5
    assert len({row.prompt for _, row in chosen}) == 20
    assert [kind for kind, _ in choose_pairs(rows[-2:])] == ["Best", "Best"]


def test_words_that_only_one_answer_has_are_marked():
    old, new = differing_words("the cat sat here", "the dog sat")
    assert old == (
        ("same", "the "),
        ("removed", "cat "),
        ("same", "sat "),
        ("removed", "here"),
    )
    assert "".join(text for _, text in old) == "the cat sat here"
    assert "".join(text for _, text in new) == "the dog sat"
    assert ("added", "dog ") in new


def test_answers_during_ppo_are_shown_with_what_the_first_answer_lacks_marked():
    answers = {0: ("a b", 0.25), 3: ("a b", 0.25), 12: ("a c", -1.0), 15: ("a c", -1.0)}
    section = watched_section([WatchedPrompt(prompt="say", answers=answers)])
    (reading,) = section.readings
    assert [one.title for one in reading.answers] == [
        "Before PPO, after update 3: score 0.25",
        "After updates 12, 15: score -1",
    ]
    first, last = (one.pieces for one in reading.answers)
    assert first == (("same", "a b"),)
    assert last == (("same", "a "), ("added", "c"))


def test_an_answer_that_returns_or_has_another_score_is_shown_again():
    answers = {0: ("a", 1.0), 1: ("b", 1.0), 2: ("a", 1.0), 3: ("a", 2.0)}
    section = watched_section([WatchedPrompt(prompt="say", answers=answers)])
    assert [one.title for one in section.readings[0].answers] == [
        "Before PPO: score 1",
        "After update 1: score 1",
        "After update 2: score 1",
        "After update 3: score 2",
    ]


@pytest.mark.parametrize("content", ["{damaged", "[]", '{"prompt": "a"}', '{"prompt": 1}'])
def test_a_missing_or_damaged_file_is_said_where_it_would_be_shown(tmp_path: Path, content: str):
    facts = facts_of(tmp_path, 3)
    assert facts.registered
    facts.registered.evaluation.judgements.unlink()
    facts.registered.evaluation.samples.write_text(content)
    texts = [one.text[0] for one in run_report(facts).sections if one.text]
    missing = [text for text in texts if text.startswith("Not shown: ")]
    assert len(missing) == 2
    assert "judgements.jsonl" in missing[0]
    assert "samples.jsonl" in missing[1]


def test_a_run_does_not_fail_for_its_page(tmp_path: Path):
    facts = facts_of(tmp_path, 3)
    (facts.run.folder / PAGE_FILE).mkdir()
    said = write_run_page(facts, RunLog(Journal(facts.run.folder), "parent"))
    assert said.startswith("The page of the run was not written: ")


def test_a_refused_reward_model_has_a_page_of_what_is_known(facts: RunFacts):
    report = replace(reward_report(), fit=False, reasons=["It prefers repeated words."])
    refused = replace(facts, reward_model=report, registered=None, evaluation=None, cost=None)
    text = document_page(run_report(refused))
    assert "The reward model was refused" in text
    assert "Rule that failed: It prefers repeated words." in text
    assert "--accept-reward-model" in text
    # A resumed run would give a corrected model of the user the digest of the refused files.
    own = dict.fromkeys(("policy", "preferences", "prompts", "reward_model"), "path")
    given = replace(refused, settings=make_settings(own, {}))
    assert "resume" not in document_page(run_report(given))
    assert 'http-equiv="refresh"' not in text


@pytest.mark.parametrize("champion", [3, None])
def test_a_champion_that_replaced_no_other_has_no_rollback(champion: int | None, facts: RunFacts):
    assert facts.registered is not None
    made = decision("promoted" if champion else "refused", champion=champion)
    first = replace(facts.registered, promotion=made, previous=None)
    text = document_page(run_report(replace(facts, registered=first)))
    assert "rollback" not in text
    assert ("delete_registered_model_alias" in text) is (champion is not None)


def test_the_page_is_written_while_ppo_trains_at_most_every_ten_seconds(
    facts: RunFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = replace(facts.run, workspace=Workspace(str(tmp_path)))
    tracker = Tracker(run.folder, run.tracking, "train_policy")
    training(tracker.journal, 3)
    page, samples = run.folder / PAGE_FILE, run.folder / "ppo" / NEWEST_SAMPLES_FILE
    row = {"query": f"ask {HOSTILE}", "response": f"say {HOSTILE}", "score": 1.25}
    kept = samples.parent / COMPLETIONS / "step-000000.jsonl"
    kept.parent.mkdir(parents=True)
    write_jsonl(samples, [row])
    write_jsonl(kept, [row])
    monkeypatch.setattr(live_view, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(live_view, "LOOK_SECONDS", 0.02)
    monkeypatch.setenv(PROGRESS, "")
    view = live_view.LiveView(run, facts.settings, tracker, LiveCard(None))
    with view.watching():
        with progress(64, f"ppo {HOSTILE}", "episode") as bar:
            bar.update(16)
            bar._written = -math.inf
            bar.update(16)
            wait_for(page)
        text = page.read_text()
        page.unlink()
        time.sleep(0.5)
        assert not page.exists()
    assert PROGRESS not in os.environ
    assert "The run is not finished" in text
    assert '<meta http-equiv="refresh" content="10">' in text
    assert '<progress max="64.0" value="32.0"' in text.replace('"64"', '"64.0"')
    assert re.search(r"32 of 64 episodes, .* left", text)
    assert "Value loss" in text
    assert "Score: 1.25" in text
    assert "Before PPO" in text
    assert text.count("&lt;script&gt;") > 3
    assert "<script>" not in text


def test_the_page_of_a_failed_run_says_so_and_how_to_continue(
    facts: RunFacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = replace(facts.run, workspace=Workspace(str(tmp_path)))
    page = run.folder / PAGE_FILE

    def fail() -> None:
        write_failure(run, facts.settings, f"train_policy failed: Out of {HOSTILE}")

    run.folder.mkdir(parents=True)
    fail()
    assert not page.exists()  # A run that has shown nothing has no page.
    tracker = Tracker(run.folder, run.tracking, "train_policy")
    training(tracker.journal, 3)
    with live_view.LiveView(run, facts.settings, tracker, LiveCard(None)).watching():
        pass
    assert "The run is not finished" in page.read_text()
    assert (warning := "Update 3. Length growth") in page.read_text()
    assert "<progress" not in page.read_text()
    fail()
    text = page.read_text()
    assert "The run failed" in text and "train_policy failed: Out of &lt;script&gt;" in text
    assert "Value loss" in text and warning in text
    assert f"rlhf.py resume --origin-run-id {run.id.removeprefix('RLHF/')}" in text
    write_failure(run, facts.settings, "evaluate_win_rate failed: again")
    assert "evaluate_win_rate failed: again" in page.read_text()
    # The outcome of a run stays.
    page.write_text("The reward model was refused")
    fail()
    assert page.read_text() == "The reward model was refused"
    page.write_bytes(b"\xff")
    fail()
    assert "Warning: The page of the run does not show the failure: " in capsys.readouterr().out


def test_the_panel_counts_down_by_the_last_run_not_by_the_phase(tmp_path: Path):
    file = tmp_path / "progress.json"
    panel = LivePanel("RLHF/1", ["start", "train_policy", "end"], {"train_policy": 3600}, file)
    panel.start_step("train_policy")
    seconds = time.monotonic()
    values = {"phase": "encoding", "total": 100, "unit": "row", "notes": None}
    for done in (10, 20, 30):
        file.write_text(json.dumps({**values, "done": done}))
        drawn = as_text(panel)
        time.sleep(0.05)
    assert time.monotonic() - seconds < 30
    assert re.search(r"step: (59|1:00):\d\d left, run: (59|1:00):\d\d left", drawn), drawn
    unknown = LivePanel("RLHF/1", ["start", "train_policy"], {}, tmp_path / "none.json")
    assert "step and run: time left unknown" in as_text(unknown)


def as_text(panel: LivePanel) -> str:
    console = Console(width=110, file=io.StringIO())
    with console.capture() as captured:
        console.print(panel)
    return captured.get()


def wait_for(file: Path) -> None:
    end = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_error_while_a_training_is_shown_does_not_end_it_and_is_said(
    facts: RunFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run = replace(facts.run, workspace=Workspace(str(tmp_path)))
    tracker = Tracker(run.folder, run.tracking, "train_policy")
    training(tracker.journal, 3)
    (run.folder / PAGE_FILE).mkdir()
    monkeypatch.setattr(live_view, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(live_view, "LOOK_SECONDS", 0.02)
    with live_view.LiveView(run, facts.settings, tracker, LiveCard(None)).watching():
        time.sleep(0.5)
    said = capsys.readouterr().out
    assert said.startswith("Warning: The training is not shown while it runs: ")
    assert said.count("Warning") == 1


def test_only_what_differs_from_the_run_of_the_champion_is_shown(
    facts: RunFacts, monkeypatch: pytest.MonkeyPatch
):
    texts = {
        ("old", "settings.toml"): "seed = 1\n[ppo]\nkl_coef = 0.1",
        ("parent", "settings.toml"): "seed = 1\n[ppo]\nkl_coef = 0.2\ngamma = 1.0",
        ("old", "packages.txt"): "torch==2.0\nsame==1\ngone==3\n",
        ("parent", "packages.txt"): "torch==2.1\nsame==1\n",
    }
    monkeypatch.setattr(differences, "read_artifact", lambda run, name: texts[run, name])
    tags = {"git_commit": "abc", "data/prompts": "old", "model/reward_model": "1", "seed": "1"}
    notes = VersionNotes(tags, {}, "old")
    monkeypatch.setattr(differences, "read_version", lambda name, version: notes)
    section = differences.differences_section(facts.run, "rlhf-policy", 2)
    assert section.rows == (
        ("settings", "ppo.gamma", "(none)", "1.0"),
        ("settings", "ppo.kl_coef", "0.1", "0.2"),
        ("code and data", "data/prompts", "old", "12"),
        ("packages", "gone", "3", "(none)"),
        ("packages", "torch", "2.0", "2.1"),
    )

    def unreachable(run: str, name: str) -> str:
        raise ModelError("MLflow does not answer.")

    monkeypatch.setattr(differences, "read_artifact", unreachable)
    section = differences.differences_section(facts.run, "rlhf-policy", 2)
    assert section.text == ("Not compared with version 2: MLflow does not answer.",)
    assert "no champion" in differences.differences_section(facts.run, "x", None).text[0]
    monkeypatch.setattr(differences, "read_version", lambda *_: VersionNotes({}, {}, None))
    section = differences.differences_section(facts.run, "rlhf-policy", 2)
    assert section.text == ("Version 2 was deleted, or was registered without an MLflow run.",)
