"""Sample answers, judge them, measure win rates, and decide on promotion."""
