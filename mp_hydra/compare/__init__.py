"""The comparison of runs: collected from MLflow, paired, judged by statistics, and shown."""
