"""A simulated client: it plays a script of timed messages to a server, and collects the answers with their times."""
