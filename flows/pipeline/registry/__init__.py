"""MLflow's model registry: register versions, and decide which version is champion."""
