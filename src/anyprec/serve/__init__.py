"""Serving model files within a latency target, with the width as the knob. Never imports torch.

scheduling/ (who runs next, at which width) <- models.py (files with their schedulers) <- http/ (requests and answers)
<- connections/ (sockets, limits, the server process); monitoring/ (what happened); simulation/ (the same scheduling in
virtual time); ray/ (replicas on a cluster).
"""
