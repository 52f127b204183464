"""Time and memory of a PPO step, here and in TRL: `make bench` and `make bench-gpu`."""
