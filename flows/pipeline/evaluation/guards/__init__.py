"""Guards: properties of answers in which a policy must not be worse than the champion (or SFT).

The limits of KL divergence, length and repetition are in `promotion.promotion_gate`.
"""
