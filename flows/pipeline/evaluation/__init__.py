"""Sample answers, judge them, and measure the win rates for `promotion.promotion_gate`."""
