"""Sockets: limits, slow clients, TLS, and the server process."""
