"""What runs next, at which width: latency table, queue, policy, and the scheduler around them."""
