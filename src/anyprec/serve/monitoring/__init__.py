"""What happened: metrics, logs, the last seconds as clients saw them."""
