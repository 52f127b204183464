"""What a run costs: memory, speed, GPUs with prices, estimated time, and what a run used."""
