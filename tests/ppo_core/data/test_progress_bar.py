"""A bar in a log has a line while a step is long."""

import re

from ppo_core.data import progress_bar
from ppo_core.data.progress_bar import progress


def test_a_long_step_has_a_line_every_ten_seconds(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines = []
    with progress(None, "timing", "pass") as bar:
        capsys.readouterr()
        for _ in range(60):
            now += 1
            bar.keep_showing()
            lines += [(now, line) for line in capsys.readouterr().err.splitlines() if line]
        bar.total = 4
        bar.update(1)
    assert progress_bar.SECONDS_BETWEEN_LINES * 2 == 10
    assert [at for at, _ in lines] == [1010, 1020, 1030, 1040, 1050, 1060]
    assert all(line.startswith("timing: 0pass [") for _, line in lines)
    assert re.search(r"timing:  25%\|.*1/4", capsys.readouterr().err)


def test_a_hidden_bar_has_no_line(monkeypatch, capsys):
    with progress(4, "timing", "pass", hidden=True) as bar:
        bar.keep_showing()
    assert capsys.readouterr().err == ""
