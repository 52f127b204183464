"""Records of the measurements and decisions of a run; stages return them, and files store them."""
