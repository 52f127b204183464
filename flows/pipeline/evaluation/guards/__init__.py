"""Guards: properties of the champion's answers that a policy must not lose."""
