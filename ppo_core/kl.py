"""Estimators of the KL divergence from a reference, from one sample per token."""

import torch
from torch import Tensor


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(policy || reference) at each sampled token, in nats.

        k1 = log p - log q              unbiased, of either sign
        k3 = q / p - 1 - log(q / p)     unbiased, never negative, less spread

    p is the policy that sampled the token, q the reference
    (J. Schulman, http://joschu.net/blog/kl-approx.html). Any shape; same shape out.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"kl_estimator={estimator!r} is unknown; choose k1 or k3.")
