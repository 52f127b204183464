"""Load the champion of a registered model. A service needs only this package, not the pipeline.

`docs/champion_service.py` is an HTTP service that uses this package.
"""
