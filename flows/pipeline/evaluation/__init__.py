"""Win rates: answers, contests, intervals, gates."""
