"""Serving a model file within a latency target, with the width as the knob. Never imports torch.

latency.py (how long a batch takes) and queue.py (who waits) -> policy.py (which width, which batch) -> desk.py (the
three together, without clock or threads) -> scheduler.py (engine threads around it), simulate.py (virtual time around
it). On top: the HTTP server (server.py) and `anyprec simulate` (cli_simulate.py).
"""
