"""Sequential tests of win rates: bets, rules of a decision, and the asking in batches."""
