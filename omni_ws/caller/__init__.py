"""One caller of a server: plays a script of messages with their times, and collects the answers with theirs."""
