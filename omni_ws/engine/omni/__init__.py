"""The voices of the Qwen omni models: Talkers and vocoders on torch, each in a process of its own."""
