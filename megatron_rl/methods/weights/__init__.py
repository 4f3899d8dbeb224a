"""Gradient weights F(w, A), one file per method. All work on log-ratios; none overflows for finite input."""
