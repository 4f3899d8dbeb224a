"""Gradient weights F(w, A), one file per paper. All work on log-ratios; none overflows for finite input."""
