"""Speed of the voices of the omni models on a GPU, with made weights: ``python -m benchmarks.gpu``."""
