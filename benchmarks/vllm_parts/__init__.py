"""Parts of ``benchmarks.vllm``, a module each: ``measure(report, size, models)``."""
