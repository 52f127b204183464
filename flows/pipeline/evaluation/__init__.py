"""Sample answers, judge them, and measure the win rates by which `promotion.gate` decides."""
