"""Load tests: requests sent to a server at times fixed beforehand, and what became of them. Needs numpy only.

arrivals.py (when) -> target.py (where, and the bytes) -> client.py (send, receive; wire.py, poller.py; processes.py
for more) -> outcome.py -> report.py, plots.py (what it means). `anyprec loadtest URL`; the simulator of anyprec.serve
draws its arrivals here too.
"""
