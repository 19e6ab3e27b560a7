"""Results of experiments as plain data, and one self-contained HTML page made from their files. No torch."""
