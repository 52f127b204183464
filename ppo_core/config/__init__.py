"""Settings of a run, validated on construction."""
