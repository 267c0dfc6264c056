"""Wyoming, the protocol of Home Assistant's voice services and satellites, on a TCP port of its own."""
