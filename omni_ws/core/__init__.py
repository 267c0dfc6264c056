"""Sans-I/O: no loop, no clock, no socket. Time enters as an argument."""
