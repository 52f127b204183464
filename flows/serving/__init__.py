"""Load the champion of a registered model; a service needs `ppo_core`, but not the pipeline.

`docs/champion_service.py` is an HTTP service that uses this package.
"""
