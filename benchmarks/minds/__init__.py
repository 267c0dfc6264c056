"""What people say to a voice (sentences.toml), asked of a mind, for a person to judge."""
