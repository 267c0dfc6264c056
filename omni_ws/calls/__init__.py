"""Recorded calls as sound, transcript and times, made of the lines of a recording (docs/recording.md, "Calls")."""
