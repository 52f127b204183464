"""The model registry of MLflow: versions, and which of them is champion."""
