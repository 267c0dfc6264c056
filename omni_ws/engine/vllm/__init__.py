"""The vLLM engine: Thinker, Talker and Code2Wav. vLLM and PyTorch are imported here and nowhere else."""
