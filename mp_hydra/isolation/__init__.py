"""Jobs of a Hydra sweep in processes of their own; knows Hydra, and neither Keras nor MLflow."""
