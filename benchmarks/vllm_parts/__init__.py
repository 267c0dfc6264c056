"""What ``benchmarks.vllm`` measures, a module for each part: ``measure(report, size, models)``."""
