"""Start and monitor the processes that train or sample."""
