"""The paper's tables and figures, one experiment each, at three scales by the same code. See `anyprec reproduce`."""
