"""Sequential tests of win rates: confidence sequences, stopping rules, and judging in batches."""
