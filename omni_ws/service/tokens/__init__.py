"""Token sessions, which salience.v1 serves."""
