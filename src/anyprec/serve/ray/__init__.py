"""The same application as replicas of Ray Serve. Only app.py imports Ray."""
