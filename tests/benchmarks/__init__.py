"""How fast and how large a PPO step is, here and in TRL: `make bench` and `make bench-gpu`."""
