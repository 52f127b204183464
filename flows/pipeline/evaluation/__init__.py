"""Sample answers, judge them, and measure win rates. `promotion.gate` decides by the result."""
