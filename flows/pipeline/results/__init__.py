"""Records of what a run measures and decides; the stages pass them on, and files keep them."""
