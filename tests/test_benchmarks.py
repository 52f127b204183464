"""The arithmetic of the benchmarks, their tables, and one tiny run of ours."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from tests.benchmarks import models, tables
from tests.benchmarks.__main__ import NO_GPU, main
from tests.benchmarks.cases import NEOX_0_9M, Case, Shape, Workload, neox
from tests.benchmarks.compare import Comparison, Pairing, alternate, task_of
from tests.benchmarks.floor import episode_flops
from tests.benchmarks.growth import Growth, VocabularyMemory, exponent, state_bytes
from tests.benchmarks.guards import refused
from tests.benchmarks.processes import MeasurementError
from tests.benchmarks.results import FIGURE, KEPT, Headline, write_results
from tests.benchmarks.tasks import Run, Task, Update
from tests.benchmarks.year_results import Week, draw_year, print_year
from tests.benchmarks.year_thumbs import (
    Users,
    changes_of,
    is_withdrawn_wrongly,
    judgments_until_withdrawn,
)

TINY = neox("tiny", vocabulary=61, width=8, layers=1, heads=2)
TINY_LLAMA = Shape(
    name="tiny-llama", family="llama", vocabulary=61, width=8, layers=1, heads=2, intermediate=16
)


def make_run(side: str, *seconds: float) -> Run:
    """Updates of 32 episodes that took so long."""
    task = task_of(Workload(shape=TINY), Path("nowhere"), side=side)
    updates = [
        Update(
            seconds=each,
            sampling=0.1,
            scoring=0.2,
            updating=0.3,
            tokens=53.0,
            in_bf16=False,
            peak_bytes=100 * tables.MIB,
            imports_bytes=40 * tables.MIB,
        )
        for each in seconds
    ]
    return Run(task=task, updates=updates)


def test_the_arithmetic_of_an_episode_is_that_done_by_hand():
    # One epoch. Backbone of 10 weights, 5 tokens: 4 forward passes (policy, reference, critic,
    # reward) and 2 training passes (policy, critic) that count 3 each: 10 x 10 x 5 = 500.
    # Head of 6 weights, 2 tokens: 2 forward passes and 1 training pass: 5 x 6 x 2 = 60.
    # 2 operations a weight and token.
    actual = episode_flops(backbone=10, head=6, prompt_tokens=3, response_tokens=2, epochs=1)
    assert actual == 2 * (500 + 60)


def test_linear_weights_are_those_of_the_layers_and_the_head():
    # Attention 8 x 24 and 8 x 8, feed-forward 8 x 32 and 32 x 8; no embeddings, no biases.
    assert models.linear_parameters(TINY) == (192 + 64 + 256 + 256, 61 * 8)
    # Attention 4 x (8 x 8), feed-forward 3 x (8 x 16); the head is the embeddings.
    assert models.linear_parameters(TINY_LLAMA) == (256 + 384, 61 * 8)


def test_a_known_power_is_recovered():
    assert exponent([1, 2, 4, 8], [3 * size**1.5 for size in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert exponent([10, 20, 40], [7, 7, 7]) == pytest.approx(0)


def test_states_are_four_numbers_a_trained_weight_and_one_a_frozen_one():
    # Policy of 3 weights, critic of 2: trained 4 x 5; reference 3 and reward 2: 25 floats.
    assert state_bytes(3, 2) == 4 * 25


def test_the_stop_probability_gives_the_mean_length():
    # The mean of min(geometric, 53) is the sum of the chances that a response is longer than t.
    stop = models.stop_probability(26, 53)
    assert sum((1 - stop) ** t for t in range(53)) == pytest.approx(26)


@pytest.mark.parametrize("shape", [NEOX_0_9M, replace(TINY_LLAMA, vocabulary=500)])
def test_the_stop_token_is_as_probable_as_asked_for_and_the_pad_token_never_comes(shape: Shape):
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(models.model_config(shape)).eval()
    rows = models.random_rows(shape, 4)
    for wanted in (0.1, None):
        models.set_stop_probability(policy, rows, wanted)
        with torch.no_grad():
            chances = (policy(rows).logits / models.TEMPERATURE).softmax(dim=-1)
        assert chances[..., models.EOS].mean().item() == pytest.approx(wanted or 0, rel=0.1)
        assert chances[..., models.PAD].max() < 1e-9


def test_a_ratio_is_of_updates_that_followed_each_other():
    # Twice, three times and four times as fast; the machine was slower in the third round.
    ours, theirs = make_run("ours", 1.0, 1.0, 5.0), make_run("trl", 2.0, 3.0, 20.0)
    pairing = Pairing(title="TRL as it ships", ours=ours, theirs=theirs)
    assert pairing.ratios() == pytest.approx([2, 3, 4])
    assert pairing.ratio == pytest.approx(3)


def test_tables_show_what_was_measured(tmp_path: Path):
    ours, theirs = make_run("ours", 1.0, 1.0), make_run("trl", 2.0, 3.0)
    comparison = Comparison(
        case=Case(workload=Workload(shape=TINY)),
        pairings=[Pairing(title="TRL as it ships", ours=ours, theirs=theirs)],
        seconds=12.0,
    )
    rate = 10 * 32 * comparison.episode_flops(ours)
    table = tables.comparison_table(comparison, {"highest": rate})
    growth = Growth(what="batch", sizes=[1, 2], seconds=[0.1, 0.2], bytes=[2**20, 2**21])
    memory = VocabularyMemory(
        vocabularies=[10, 20], state_bytes=[2**20, 2**21], peak_bytes=[3 * 2**20, 4 * 2**20]
    )
    console = Console(width=200, record=True)
    for each in (table, tables.growth_table([growth]), tables.memory_table(memory)):
        console.print(each)
    text = console.export_text()
    # 32 episodes a second, 10 % of the rate; ratios 2 and 3.
    for shown in ("tiny-full", "32.00 (32.00-32.00)", "10%", "2.50 (2.00-3.00)", "100.0, 200.0"):
        assert shown in text

    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    results = folder / "RESULTS.md"
    results.write_text(f"old\n\n{KEPT}\n\nTwo threads.\n")
    headline = Headline(what="SFT", model="neox-10m", ratios=[2.0, 2.5, 4.0], memory=0.5)
    for _ in range(2):
        write_results(results, ["Processor: one"], [headline], [table])
    written = results.read_text()
    assert "old" not in written
    assert "| SFT | neox-10m | 2.50 (2.00 .. 4.00) | 0.50 |" in written
    assert (folder / FIGURE).read_bytes().startswith(b"\x89PNG")
    assert written.count(KEPT) == written.count("Two threads.") == 1
    assert "| ours |" in written


def test_a_task_survives_the_command_line():
    task = task_of(Workload(shape=TINY), Path("models"), side="trl", threads=1)
    assert Task.from_json(task.to_json()) == task


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--cases", "gpt"])
    assert "no case begins with gpt" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_measurement_on_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert main(["--gpu"]) == NO_GPU
    assert "There is no CUDA device" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_of_ours_take_turns(tmp_path: Path):
    workload = Workload(
        shape=TINY, microbatch=2, accumulation=2, response_length=4, prompt_lengths=(5, 6, 7, 8)
    )
    models.save_models(workload, tmp_path)
    task = task_of(workload, tmp_path, side="ours", threads=1)
    runs = alternate([task, replace(task, bf16=True)], warmups=1, rounds=2)
    for run in runs:
        assert len(run.updates) == 2
        for update in run.updates:
            assert update.tokens == 4
            assert update.sampling + update.scoring + update.updating <= update.seconds
            assert update.peak_bytes > update.imports_bytes > 0


@pytest.mark.slow
def test_a_process_that_fails_says_why(tmp_path: Path):
    task = task_of(Workload(shape=TINY), tmp_path / "missing", side="ours", threads=1)
    with pytest.raises(MeasurementError, match=r"ended with 1:[\s\S]*missing"):
        alternate([task], warmups=0, rounds=1)


def weeks_of(champions: str, topics: str) -> list[Week]:
    """Weeks with a champion at their end, in which users ask about one of two topics."""
    figures = {"won": 0.5, "liked": 0.5, "labels": 0, "judged": 0, "seconds": 0.0}
    shares = {"a": (1.0, 0.0), "b": (0.0, 1.0)}
    return [
        Week(number=n, event="", outcome="", champion=one, shares=shares[topic], **figures)
        for n, (one, topic) in enumerate(zip(champions, topics, strict=True), 1)
    ]


def test_users_see_a_champion_from_the_week_after_its_promotion():
    (change,) = changes_of(weeks_of("11122", "aaaab"))
    assert (change.old, [week.number for week in change.before]) == ("1", [2, 3, 4])
    assert (change.new, [week.number for week in change.after]) == ("2", [5])


@pytest.mark.parametrize(
    ("old", "new", "topics", "is_wrong"),
    [
        ([0.9, 0.9], [0.9, 0.9], "aaaaaaaaaaaa", False),
        ([0.9, 0.9], [0.5, 0.5], "aaaaaaaaaaaa", False),
        # Both are liked less, because users ask about the other topic.
        ([0.9, 0.5], [0.9, 0.5], "aaaaaabbbbbb", True),
        ([0.9, 0.5], [0.9, 0.4], "aaaaaabbbbbb", False),
    ],
)
def test_a_withdrawal_is_wrong_if_the_champion_is_as_good(old, new, topics: str, is_wrong: bool):
    (change,) = changes_of(weeks_of("111111222222", topics))
    users = Users(count=1_500, thumbs=200, liked={"1": old, "2": new})
    found = [is_withdrawn_wrongly(Random(n), change, users) for n in range(5)]
    assert found == [is_wrong] * 5


def test_a_worse_champion_is_withdrawn_after_some_hundred_judgments():
    (change,) = changes_of(weeks_of("111111222222", "aaaaaaaaaaaa"))
    users = Users(count=1_500, thumbs=200, liked={"1": [0.9, 0.9], "2": [0.9, 0.9]})
    assert [judgments_until_withdrawn(Random(n), change, users, 0.0) for n in range(5)] == [0] * 5
    needed = [judgments_until_withdrawn(Random(n), change, users, 0.3) for n in range(5)]
    assert all(20 <= count <= 150 for count in needed)


def test_a_year_is_printed_with_its_largest_loss_and_drawn(tmp_path: Path, capsys):
    rates = (0.5, 0.9, 0.88, 0.95)
    weeks = [
        replace(week, won=won, outcome="promoted 1", event="outage" if won == 0.88 else "")
        for week, won in zip(weeks_of("1111", "aaaa"), rates, strict=True)
    ]
    print_year(weeks)
    told = " ".join(capsys.readouterr().out.split())
    assert "the champion wins 95.0 % against SFT" in told
    assert "The largest loss from one week to the next is 2.0 points, in week 3." in told
    draw_year(weeks, tmp_path / "year.png")
    assert (tmp_path / "year.png").read_bytes().startswith(b"\x89PNG")


def test_a_guard_refuses_worse_policies_and_no_equal_one():
    assert refused(256, bad=0.05, worse=0.0, runs=50) == 0
    assert refused(256, bad=0.0, worse=0.1, runs=20) == 1
