"""Recorded and made sound, what is said in it, and how it is compared with what was heard."""
