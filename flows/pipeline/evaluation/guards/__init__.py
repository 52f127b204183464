"""Guards: properties of the champion's (or SFT's) answers that a policy must not lose.

The limits of KL divergence, length and repetition are in `promotion.promotion_gate`.
"""
