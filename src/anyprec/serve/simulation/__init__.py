"""The same scheduling in virtual time: attainment, accuracy, how many replicas a load needs."""
