"""What the steps of the flow call: plain values in, plain values out."""
