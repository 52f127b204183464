"""Estimate and measure what a run costs: memory, time, price, and use of GPUs and judges."""
