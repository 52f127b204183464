"""Four weeks of the simulated year: a first champion, poisoned labels, an outage, and its end."""

from pathlib import Path

import pytest

from pipeline.registry.aliases import read_aliases
from tests.benchmarks.year import NAME, Year, write_inputs
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import mlflow_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_neither_poison_nor_an_outage_changes_the_champion(tmp_path: Path):
    events = {2: "poisoned labels", 3: "outage"}
    with mlflow_server(tmp_path) as server, tracking_to(server.url):
        write_inputs(tmp_path, seed=1)
        year = Year(tmp_path, 52, 1, server, events)
        first, poisoned, cut, after = (year.run_week(number) for number in (1, 2, 3, 4))
        assert (first.outcome, first.champion) == ("promoted 1", "1")
        assert first.won > 0.6
        assert (poisoned.outcome, poisoned.champion) == ("reward model refused", "1")
        assert (cut.outcome, cut.champion) == ("failed", "1")
        # PPO and evaluation went on; the registration waited for minutes, and registered nothing.
        told = (tmp_path / "week-03.log").read_text()
        assert "Judge the policy's answers" in told
        assert "The run stopped:\nMLflow has not accepted" in told
        assert after.outcome.split()[0] in ("promoted", "refused")
        assert str(read_aliases(NAME)["champion"]) == after.champion
        thumbs = (tmp_path / "feedback" / "feedback.jsonl").read_text().splitlines()
        assert len(thumbs) == 3 * 200
