"""MLflow: tracking, versions, and which of them is champion. No other package imports mlflow."""
